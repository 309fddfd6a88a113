"""What the scales and zero points of a number format may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.errors import ConfigError
from ao_core.spec import SCALE_DTYPES, ZERO_POINT_KINDS

if TYPE_CHECKING:
    from ao_core.records import DType

__all__ = ["CODEBOOK_DTYPES", "SCALE_RULES", "SIGNED_SCALES", "check_format", "check_rule"]

#: what of a block its scale follows, without a zero point: its largest magnitude, which becomes
#: `quant_max_of` ("absmax") or the format's greatest value ("greatest"), or its mean one ("absmean"); of an
#: element, its row and its column ("rank1")
SCALE_RULES = ("absmax", "greatest", "absmean", "rank1")

#: storage in which the scale of a format without zero points may be negative: it turns the signs of codes
SIGNED_SCALES = ("float32", "bfloat16", "float16")
#: what learned values may be stored in
CODEBOOK_DTYPES = SIGNED_SCALES


def check_format(dtype: DType, zero_point: str, scale_dtype: str) -> None:
    """Raise `ConfigError` where a number format has no such zero point, or scales in no such dtype."""
    if zero_point not in ZERO_POINT_KINDS:
        raise ConfigError(
            f"zero_point={zero_point!r} is unknown; use one of {', '.join(ZERO_POINT_KINDS)}"
        )
    if zero_point == "int" and dtype.kind != "int":
        raise ConfigError(
            f"zero_point='int' needs an integer format, but {dtype.name} is of kind {dtype.kind!r}; "
            "use zero_point='none' or 'float'"
        )
    if dtype.kind == "codebook" and (zero_point != "none" or scale_dtype not in CODEBOOK_DTYPES):
        raise ConfigError(
            f"zero_point={zero_point!r} and scale_dtype={scale_dtype!r}: {dtype.name} has learned "
            f"values in place of scales; use zero_point='none' and one of "
            f"{', '.join(CODEBOOK_DTYPES)} for the values"
        )
    if scale_dtype not in SCALE_DTYPES:
        raise ConfigError(
            f"scale_dtype={scale_dtype!r} is unknown; use one of {', '.join(SCALE_DTYPES)}"
        )


def check_rule(rule: str, zero_point: str, scale_dtype: str) -> None:
    """Raise `ConfigError` if no such rule is defined for this zero point and dtype of scales."""
    if rule not in SCALE_RULES:
        raise ConfigError(f"scale_rule={rule!r} is unknown; use one of {', '.join(SCALE_RULES)}")
    if rule != "absmax" and (zero_point != "none" or scale_dtype == "e8m0"):
        raise ConfigError(
            f"scale_rule={rule!r} with zero_point={zero_point!r} and scale_dtype={scale_dtype!r} is not "
            "defined; use zero_point='none' and a scale in another dtype than e8m0"
        )

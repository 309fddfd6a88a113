"""The configuration that ao-core itself brings: weights in any format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ao_core.errors import ConfigError
from ao_core.numerics import CODEBOOK_DTYPES
from ao_core.records import Transform
from ao_core.registry import registry
from ao_core.spec import SCALE_DTYPES, ZERO_POINT_KINDS
from ao_core.weights import (
    GroupSize,
    WeightConfig,
    WeightFormat,
    apply_weight_config,
    matrix_spec,
    own_scale_dtype,
)

__all__ = [
    "BUILTIN_TRANSFORMS",
    "WeightOnlyConfig",
    "weight_only",
]


@dataclass(frozen=True)
class WeightOnlyConfig(WeightConfig):
    """Store weights in any registered number format, a plugin's too; activations stay as they are."""

    #: name of the number format
    dtype: str = "int8"
    #: weights that share one scale: a number of them along a row, "row" or "tensor"
    group_size: GroupSize = "row"
    #: storage of the scale, or "own": the dtype of the parameter; dense formats such as "bf16" have none
    scale_dtype: str = "own"
    #: zero points: "none", "int", "float" or "offset"
    zero_point: str = "none"
    #: how scales are chosen: "absmax", "mse", "hqq" or a plugin's `ScaleMethod`
    scale_method: str = "absmax"
    #: name of the layout of weights that are multiplied, e.g. "two_four" of ao-sparsity; convolutions are
    #: skipped then. None: one code after the other, packed where it has less than 8 bits
    layout: str | None = None

    def __post_init__(self) -> None:
        size = self.group_size
        if (
            size not in ("row", "tensor")
            if isinstance(size, str)
            else type(size) is not int or size < 1
        ):
            raise ConfigError(
                f"group_size={self.group_size!r}: use a positive number, 'row' or 'tensor'"
            )
        if self.scale_dtype not in ("own", *SCALE_DTYPES):
            allowed = ", ".join(("own", *SCALE_DTYPES))
            raise ConfigError(f"scale_dtype={self.scale_dtype!r} is unknown; use one of {allowed}")
        if self.zero_point not in ZERO_POINT_KINDS:
            raise ConfigError(
                f"zero_point={self.zero_point!r} is unknown; use one of {', '.join(ZERO_POINT_KINDS)}"
            )

    def check(self) -> None:
        """Check the names against the registry.

        Raises:
            UnknownNameError: nobody registered the number format, the layout or the scale method.
            ConfigError: the number format has no such zero point, or no scale.
        """
        registry.scale_methods.get(self.scale_method)
        if self.layout is not None:
            registry.layouts.get(self.layout)
        numbers = registry.dtypes.get(self.dtype)
        if not numbers.has_scale and (self.scale_dtype != "own" or self.scale_method != "absmax"):
            raise ConfigError(
                f"scale_dtype={self.scale_dtype!r} and scale_method={self.scale_method!r}: {self.dtype} "
                "stores values as they are and has no scale; use 'own' and 'absmax'"
            )
        kind = numbers.kind
        if kind == "codebook" and (
            self.zero_point != "none" or self.scale_dtype not in ("own", *CODEBOOK_DTYPES)
        ):
            raise ConfigError(
                f"zero_point={self.zero_point!r} and scale_dtype={self.scale_dtype!r}: {self.dtype} has "
                f"learned values in place of scales; use zero_point='none' and one of own, "
                f"{', '.join(CODEBOOK_DTYPES)}"
            )
        if kind != "int" and self.zero_point == "int":
            raise ConfigError(
                f"zero_point='int' needs an integer format, not {self.dtype!r}; use 'none' or 'float'"
            )

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        scale = own_scale_dtype(dtype) if self.scale_dtype == "own" else self.scale_dtype
        layout = self.layout or ""
        spec = matrix_spec(self.dtype, self.group_size, scale, self.zero_point, layout=layout)
        return WeightFormat(spec, self.scale_method, matrices_only=bool(self.layout))


weight_only = WeightOnlyConfig


def _weight_only_head(config: WeightOnlyConfig) -> WeightOnlyConfig | None:
    """int8 with one scale per row, where the format has fewer bits."""
    return WeightOnlyConfig() if registry.dtypes.get(config.dtype).bits < 8 else None


BUILTIN_TRANSFORMS = (
    Transform(WeightOnlyConfig, "weight_only", 1, apply_weight_config, for_head=_weight_only_head),
)

"""`Float8LinearConfig`: which matmuls of linear layers are in float8, and how they are scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ao_core import Config
from ao_core.ext import ConfigError, UnknownNameError

__all__ = ["MIN_MEAN_DIM", "PRESETS", "Float8LinearConfig", "Float8Matmul"]

#: what shares a scale, for the operands a and b of a matmul
GRANULARITIES = ("tensor", "row", "block", "mx")
FORMATS = ("e4m3", "e5m2")

#: Mean size below which a layer is kept by `convert_to_float8_training`. From published figures of
#: forward and backward on H100, not measured here: 0.80 times the speed of bfloat16 at K = 2048,
#: N = 1024 (a mean of 1365), 1.41 times at K = N = 4096.
MIN_MEAN_DIM = 2048


class Float8Matmul(NamedTuple):
    """How one of the three matmuls, ``a @ b.T``, is computed in float8."""

    #: what shares a scale: "tensor"; "row", a row of either operand; "block", 128 contracted elements of
    #: activations and gradients and 128 × 128 of weights; "mx", 32 elements with a power of two
    granularity: str = "row"
    #: format of a: the input, or the gradient in both matmuls of the backward pass: "e4m3" or "e5m2"
    a: str = "e4m3"
    #: format of b: the weight, or the input in the matmul that gives the gradient of the weight
    b: str = "e4m3"
    #: let tensor cores add in fewer bits than float32, which is faster on Hopper; elsewhere no matter
    fast_accumulation: bool = True

    def __repr__(self) -> str:
        changed = [
            f"{name}={value!r}"
            for name, value in self._asdict().items()
            if value != self._field_defaults[name]
        ]
        return f"Float8Matmul({', '.join(changed)})"


_ROW = Float8Matmul("row")
_BLOCK = Float8Matmul("block")
_MX = Float8Matmul("mx")
_TENSOR = Float8Matmul("tensor")
_TENSOR_GRAD = Float8Matmul("tensor", a="e5m2", fast_accumulation=False)

#: recipe -> its matmuls: output, gradient of the input, gradient of the weight
PRESETS: dict[str, tuple[Float8Matmul | None, ...]] = {
    "tensorwise": (_TENSOR, _TENSOR_GRAD, _TENSOR_GRAD),
    "rowwise": (_ROW, _ROW, _ROW),
    "rowwise_with_gw_hp": (_ROW, _ROW, None),
    "blockwise": (_BLOCK, _BLOCK, _BLOCK),
    "mxfp8": (_MX, _MX, _MX),
}


@dataclass(frozen=True)
class Float8LinearConfig(Config):
    """Train linear layers, and 3-D weights of experts, with float8 matmuls; weights stay as they are.

    Each matmul is a `Float8Matmul`, a tuple of its fields, or None for high precision. Sizes are
    padded inside if a kernel needs multiples.
    """

    #: output = input @ weight.T
    output: Float8Matmul | None = _TENSOR
    #: gradient of the input = gradient @ weight
    grad_input: Float8Matmul | None = _TENSOR_GRAD
    #: gradient of the weight = gradient.T @ input
    grad_weight: Float8Matmul | None = _TENSOR_GRAD
    #: round scales up to powers of two, so that scaling itself rounds nothing
    power_of_two_scales: bool = False
    #: let FSDP2 gather weights as float8, cast already; for casts of the weight that both matmuls which
    #: read it share: "tensor", or the "block" of weights
    enable_fsdp_float8_all_gather: bool = False
    #: keep layers of a smaller mean size 2·K·N / (K + N), which would gain nothing; 0 converts all.
    #: See `MIN_MEAN_DIM`
    min_mean_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("output", "grad_input", "grad_weight"):
            object.__setattr__(self, name, _matmul(name, getattr(self, name)))
        if type(self.min_mean_dim) is not int or self.min_mean_dim < 0:
            raise ConfigError(
                f"min_mean_dim={self.min_mean_dim!r}: use 0 or a mean size such as {MIN_MEAN_DIM}"
            )

    def check(self) -> None:
        """Raise `ConfigError` where FSDP2 cannot gather what the matmuls need."""
        from ao_float8.specs import matmuls_of

        matmuls_of(self)

    @classmethod
    def from_recipe_name(cls, name: str, **changes: Any) -> Float8LinearConfig:
        """One of `PRESETS`, with other values for the given fields.

        Raises:
            UnknownNameError: there is no such recipe.
        """
        if name not in PRESETS:
            raise UnknownNameError("float8 recipe", name, PRESETS)
        fields = ("output", "grad_input", "grad_weight")
        return cls(**{**dict(zip(fields, PRESETS[name], strict=True)), **changes})


def _matmul(name: str, value: Any) -> Float8Matmul | None:
    """A matmul from itself or from the list that JSON makes of it, checked."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: use a Float8Matmul, or None for high precision")
    try:
        matmul = Float8Matmul(*value)
    except TypeError as error:
        raise ConfigError(f"{name}={value!r}: {error}; use a Float8Matmul") from error
    if not isinstance(matmul.fast_accumulation, bool):
        raise ConfigError(
            f"fast_accumulation={matmul.fast_accumulation!r} of {name}: use True or False"
        )
    if matmul.granularity not in GRANULARITIES:
        raise ConfigError(
            f"granularity={matmul.granularity!r} of {name}: use one of {', '.join(GRANULARITIES)}"
        )
    for operand, dtype in (("a", matmul.a), ("b", matmul.b)):
        if dtype not in FORMATS:
            raise ConfigError(
                f"{operand}={dtype!r} of {name}: use one of {', '.join(FORMATS)}; None in place of the "
                "matmul keeps all of it in high precision"
            )
    return matmul

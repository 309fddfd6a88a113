"""The transform and recipes that ao-core itself brings: low-precision products in reference arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.records import Recipe, Skip, Target, Transform
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import ComputeWeight

__all__ = ["BUILTIN_RECIPES", "BUILTIN_TRANSFORMS", "ComputeConfig", "compute"]


@dataclass(frozen=True)
class ComputeConfig(Config):
    """Train with the products of linear layers in low precision; weights stay in high precision.

    Each operand is quantized along the contracted dimension, with one scale a row.
    """

    #: number format of input and weight in the forward product
    dtype: str = "f8e4m3"
    #: number format of gradients in the backward products; None: those products in high precision
    grad_dtype: str | None = "f8e5m2"

    def __post_init__(self) -> None:
        for name in ("dtype", "grad_dtype"):
            value = getattr(self, name)
            if value is not None and value not in registry.dtypes:
                known = ", ".join(registry.dtypes.names())
                raise ConfigError(f"{name}={value!r} is no known number format; known: {known}")


compute = ComputeConfig


def _apply(weight: Tensor, config: ComputeConfig, target: Target) -> Tensor | Skip:
    if weight.dim() != 2:
        return Skip(
            f"low-precision products are defined for 2-D weights, not {weight.dim()}-D ones"
        )
    if isinstance(target.module, (nn.Embedding, nn.EmbeddingBag)):
        return Skip("a lookup has no product that could be in low precision")
    row = Spec(config.dtype, (1, WHOLE))
    output = replace(row, act=row)
    if config.grad_dtype is None:
        return ComputeWeight(weight, output)
    backward = replace(row, act=Spec(config.grad_dtype, (1, WHOLE)))
    return ComputeWeight(weight, output, backward, backward)


BUILTIN_TRANSFORMS = (Transform(ComputeConfig, "compute", 1, _apply),)

BUILTIN_RECIPES = (
    Recipe("compute/f8_rowwise", ComputeConfig(), "float8 products: e4m3 forward, e5m2 gradients"),
    Recipe(
        "compute/int8_rowwise", ComputeConfig("int8", "int8"), "int8 products forward and backward"
    ),
)

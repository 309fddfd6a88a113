"""The transforms of ao-quant: from a dense parameter to a quantized one, by its role."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ao_core.config import Config
from ao_core.records import Skip, Target, Transform
from ao_core.tensor import quantize_tensor
from ao_quant.configs import CONFIGS
from ao_quant.specs import spec_of

__all__ = ["TRANSFORMS", "apply"]

#: dynamic configurations -> the one that stores the same weights and leaves activations alone
_WEIGHT_ONLY = {
    "int8_dynamic_activation_int8_weight": "int8_weight_only",
    "float8_dynamic_activation_float8_weight": "float8_weight_only",
    "int8_dynamic_activation_int4_weight": "int4_weight_only",
}


def apply(dense: Tensor, config: Config, target: Target) -> Tensor | Skip:
    """The quantized form of a parameter, or why there is none in this format."""
    conv = isinstance(target.module, _ConvNd) or dense.dim() > 3
    spec = spec_of(config, tuple(dense.shape), dense.dtype, conv=conv)
    if spec.act is not None and (role := _not_linear(dense, target, conv)):
        name = next(name for name, cls in CONFIGS.items() if cls is type(config))
        return Skip(
            f"{role}, and {name} quantizes the activations of linear layers only; "
            f"{_WEIGHT_ONLY[name]!r} would quantize this weight"
        )
    return quantize_tensor(dense, spec)


def _not_linear(dense: Tensor, target: Target, conv: bool) -> str:
    """What the parameter is, if not the weight of a linear layer."""
    if conv:
        return "it holds the filters of a convolution"
    if isinstance(target.module, (nn.Embedding, nn.EmbeddingBag)):
        return "it is an embedding"
    if dense.dim() == 3:
        return "it holds the 3-D weights of experts"
    return ""


TRANSFORMS: tuple[Transform, ...] = tuple(
    Transform(config_type, name, config_type.version, apply)
    for name, config_type in CONFIGS.items()
)

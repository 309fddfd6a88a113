"""From a configuration and a parameter to its quantized form: what configurations of weights share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ao_core.config import Config
from ao_core.errors import ConfigError, QuantizationError
from ao_core.records import Skip, Target
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, ROW, TENSOR, WHOLE, Primitive, Spec
from ao_core.tensor import quantize_values
from ao_core.tensor.convolutions import matrix_spec_of

__all__ = [
    "GroupSize",
    "WeightConfig",
    "WeightFormat",
    "apply_weight_config",
    "bias_name",
    "is_conv",
    "matmul_unsupported_reason",
    "matrix_spec",
    "own_scale_dtype",
    "quantize_weight",
    "weight_spec",
]

#: weights that share one scale: a number of them, "row" or "tensor"
GroupSize = int | str

#: modules of (in, out) weights, the transpose of those of `nn.Linear`: by the name of their class
_TRANSPOSED = ("transformers.pytorch_utils.Conv1D",)
#: dtypes of a parameter that its scales can have too
_OWN = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class WeightFormat:
    """How a configuration stores weights, whatever their shapes."""

    #: the format of a matrix (out, in); `weight_spec` has that of other shapes
    spec: Spec
    #: name of the `ScaleMethod` that chooses scales and zero points
    scale_method: str = "absmax"
    #: scale, and zero point if any, of activations that are static: one, or one for each matrix of experts
    act_scale: float | tuple[float, ...] | None = None
    act_zero_point: float | tuple[float, ...] | None = None
    #: whether activations of convolutions and of 3-D weights of experts are quantized too, or those of linear
    #: layers only
    acts_everywhere: bool = False
    #: whether the layout is for matrices that are multiplied, so that filters and vectors are skipped
    matrices_only: bool = False

    def scale_for(self, dense: Tensor) -> float | Tensor | None:
        """The scale of activations as `quantize_values` takes it, for a weight (…, out, in).

        Raises:
            ConfigError: there is one for each of several experts, and the weight has another number of them.
        """
        return _values("act_scale", self.act_scale, dense)

    def zero_point_for(self, dense: Tensor) -> float | Tensor | None:
        """Likewise their zero point."""
        return _values("act_zero_point", self.act_zero_point, dense)


class WeightConfig(Config):
    """A configuration that stores weights in another format; `weight_format` says in which."""

    is_format: ClassVar[bool] = True
    #: where activations are quantized too: name of the recipe that stores the same weights and leaves
    #: activations alone
    weight_only: ClassVar[str] = ""

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        raise NotImplementedError(f"{type(self).__name__} has no weight_format")

    def spec(self, shape: tuple[int, ...], dtype: torch.dtype, *, conv: bool = False) -> Spec:
        """The `Spec` of a weight of this shape and dtype; see `weight_spec`."""
        return weight_spec(self.weight_format(dtype).spec, shape, conv=conv)


def matrix_spec(
    dtype: str,
    group: GroupSize,
    scale_dtype: str | Spec,
    zero_point: str = "none",
    *,
    act: Spec | None = None,
    rows: int = 1,
    layout: str = "",
    options: tuple[tuple[str, Primitive], ...] = (),
) -> Spec:
    """The format of a matrix (out, in) with one scale per group along its rows.

    Args:
        dtype: name of the number format. One without scales has no groups either.
        group: weights that share one scale: a number of them along a row, "row" or "tensor".
        scale_dtype: as in `Spec`.
        zero_point: as in `Spec`.
        act: as in `Spec`.
        rows: rows that share a scale with a group: blocks of (rows, group).
        layout: empty: "plain" for codes of whole bytes, "packed" for others.
        options: as in `Spec`.

    Raises:
        ConfigError: `group` is another word.
        UnknownNameError: nobody registered the number format.
    """
    numbers = registry.dtypes.get(dtype)
    block = {"row": ROW, "tensor": TENSOR}.get(group) if isinstance(group, str) else (rows, group)
    if block is None:
        raise ConfigError(f"group={group!r}: use a positive number, 'row' or 'tensor'")
    layout = layout or ("plain" if numbers.bits >= 8 else "packed")
    if not numbers.has_scale:
        scale_dtype, block = NO_SCALE, ROW
    return Spec(dtype, block, scale_dtype, zero_point, layout, act, options)


def own_scale_dtype(dtype: torch.dtype) -> str:
    """The storage of scales that have the dtype of their weight; float32 where it cannot be that of one."""
    return _OWN.get(dtype, "float32")


def weight_spec(matrix: Spec, shape: tuple[int, ...], *, conv: bool = False) -> Spec:
    """The format of a weight of `shape` (..., out, in), or, with `conv`, of filters (out, in, *kernel).

    Groups run along the last dimension; a row that they do not divide ends with a shorter one, and codes
    of less than 8 bits are packed along it. Filters have no other layout: along their last dimension, the
    few columns of a kernel, both would be short. So groups and packed codes take filters as one stream of
    numbers: a row is the whole filter, and where groups do not divide a filter, they span two.

    Args:
        matrix: the format of a matrix.
        shape: of the weight.
        conv: whether it holds the filters of a convolution.
    """
    if not conv:
        return matrix
    *_, width = matrix.block
    per_tensor = matrix.block == TENSOR
    if matrix.layout == "plain" and width == WHOLE:
        lead = WHOLE if per_tensor else 1
        return replace(matrix, block=(lead, *[WHOLE] * (len(shape) - 1)))
    filter_size = max(prod(shape[1:]), 1)
    length = WHOLE if per_tensor else filter_size if width == WHOLE else min(width, filter_size)
    return replace(matrix, block=(length,), layout="flat")


def is_conv(dense: Tensor, target: Target) -> bool:
    """Whether a parameter holds the filters of a convolution."""
    return isinstance(target.module, _ConvNd) or dense.dim() > 3


def matmul_unsupported_reason(weight: Tensor, target: Target) -> str | None:
    """Why a parameter takes part in no matmul that a `ComputeWeight` casts; None where it does."""
    if isinstance(target.module, (nn.Embedding, nn.EmbeddingBag)):
        return "a lookup has no matmul that could be in low precision"
    if reason := getattr(target.module, "own_matmuls", ""):  # layers of other packages say so
        return str(reason)
    if weight.dim() not in (2, 3) or is_conv(weight, target):
        return (
            "low-precision matmuls are defined for 2-D weights and for the 3-D ones of experts, not for "
            f"the {weight.dim()}-D ones of {type(target.module).__name__}"
        )
    if weight.dtype == torch.float64:
        return (
            "low-precision matmuls accumulate in float32, which would round float64 weights; convert the "
            "model to float32 or bfloat16 first"
        )
    return None


def is_transposed(target: Target) -> bool:
    """Whether a parameter is a weight (in, out), which is multiplied as it is."""
    return target.name == "weight" and any(
        f"{c.__module__}.{c.__qualname__}" in _TRANSPOSED for c in type(target.module).__mro__
    )


def bias_name(target: Target) -> str | None:
    """The name of the bias of a weight in its module, as "bias" of "weight"; None where it has none."""
    name = target.name.replace("weight", "bias")
    has = name != target.name and target.module._parameters.get(name) is not None
    return name if has else None


def quantize_weight(
    dense: Tensor,
    fmt: WeightFormat,
    target: Target,
    encode: Callable[[Tensor, Spec], Tensor] | None = None,
) -> Tensor | Skip:
    """The quantized form of a parameter, or why there is none.

    Activations are quantized in linear layers, and in others where `fmt.acts_everywhere`.

    Args:
        dense: the parameter: (out, in), (in, out) where its module has it so, (experts, out, in) or filters
            (out, in / groups, *kernel).
        fmt: its format.
        target: where it is.
        encode: finds codes and scales of (values, spec) together; by default `fmt.scale_method` finds scales.

    Raises:
        QuantizationError: the module changes its weight when it is called.
    """
    if getattr(target.module, "max_norm", None) is not None:
        raise QuantizationError(
            "max_norm rescales its rows in place at each lookup; use max_norm=None"
        )
    transposed = is_transposed(target)
    if transposed:  # groups run along what is summed over
        dense = dense.t()
    conv = is_conv(dense, target)
    if fmt.matrices_only and (conv or dense.dim() < 2):
        role = "holds the filters of a convolution" if conv else "has one dimension"
        layout = fmt.spec.layout
        return Skip(f"it {role}, and the layout {layout!r} is for matrices that are multiplied")
    spec = weight_spec(fmt.spec, tuple(dense.shape), conv=conv)
    if fmt.spec.act is not None and (reason := _takes_no_acts(dense, fmt, spec, target, conv)):
        return Skip(reason)
    quantized = (
        quantize_values(
            dense,
            spec,
            scale_method=fmt.scale_method,
            act_scale=fmt.scale_for(dense),
            act_zero_point=fmt.zero_point_for(dense),
        )
        if encode is None
        else encode(dense, spec)
    )
    return quantized.t() if transposed else quantized


def apply_weight_config(dense: Tensor, config: WeightConfig, target: Target) -> Tensor | Skip:
    """The quantized form of a parameter, or why there is none in this format: `Transform.apply`."""
    new = quantize_weight(dense, config.weight_format(dense.dtype), target)
    if not isinstance(new, Skip) or not config.weight_only:
        return new
    return Skip(f"{new.reason}; {config.weight_only!r} would quantize this weight")


def _values(
    name: str, given: float | tuple[float, ...] | None, dense: Tensor
) -> float | Tensor | None:
    """A value for all matrices, or those of experts as a tensor."""
    if not isinstance(given, tuple):
        return given
    if dense.dim() != 3 or len(given) != len(dense):
        raise ConfigError(
            f"{name} has {len(given)} values, and a weight of {tuple(dense.shape)} takes "
            f"{f'one, or {len(dense)}' if dense.dim() == 3 else 'one'}"
        )
    return torch.tensor(given, device="cpu").to(dense.device)


def _takes_no_acts(
    dense: Tensor, fmt: WeightFormat, spec: Spec, target: Target, conv: bool
) -> str | None:
    """Why the activations that a parameter is multiplied with are not quantized; None where they are."""
    what = _not_linear(dense, target, conv)
    if what is None:
        return None
    if not fmt.acts_everywhere:
        return f"{what}, and activations are quantized in linear layers only"
    module = target.module
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.Bilinear)):
        return f"{what}, and activations are quantized in linear layers, convolutions and experts"
    if not conv:
        return None
    if not isinstance(module, _ConvNd) or isinstance(module, _ConvTransposeNd):
        return (
            f"{what} that is none of Conv1d, Conv2d and Conv3d, whose activations are not quantized"
        )
    if matrix_spec_of(spec) is None:
        return f"{what}, and activations are quantized where a filter has one scale, not in {spec}"
    return None


def _not_linear(dense: Tensor, target: Target, conv: bool) -> str | None:
    """What the parameter is, if not the weight of a linear layer."""
    if conv:
        return "it holds the filters of a convolution"
    if isinstance(target.module, (nn.Embedding, nn.EmbeddingBag)):
        return "it is an embedding"
    if isinstance(target.module, nn.Bilinear):
        return "it is the weight of a bilinear form"
    if dense.dim() == 3:
        return "it holds the 3-D weights of experts"
    return None

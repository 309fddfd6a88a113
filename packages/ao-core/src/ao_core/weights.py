"""From a weight format and the shape of a parameter to its `Spec`: what configurations share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ao_core.errors import QuantizationError
from ao_core.records import Skip, Target
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, TENSOR, WHOLE, Primitive, Spec
from ao_core.tensor import quantize_values

__all__ = [
    "GroupSize",
    "WeightFormat",
    "is_conv",
    "matmul_unsupported_reason",
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
    """What a configuration says of any weight, whatever its shape."""

    dtype: str
    group: GroupSize
    #: as in `Spec`; "own": the dtype of the parameter, or no scale where the format has none
    scale_dtype: str | Spec
    zero_point: str = "none"
    act: Spec | None = None
    #: rows that share a scale with a group: 2-D blocks of (rows, group); filters have none
    rows: int = 1
    #: the layout of codes of less than 8 bits
    packing: str = "packed"
    #: the layout of weights that are multiplied, whatever their bits; empty: "plain", or `packing`
    layout: str = ""
    #: as in `Spec`
    options: tuple[tuple[str, Primitive], ...] = ()
    #: name of the `ScaleMethod` that chooses scales and zero points
    scale_method: str = "absmax"
    #: scale, and zero point if any, of activations that are static
    act_scale: float | None = None
    act_zero_point: float | None = None


def weight_spec(
    fmt: WeightFormat, shape: tuple[int, ...], dtype: torch.dtype, *, conv: bool = False
) -> Spec:
    """The format of a weight of `shape` (..., out, in), or, with `conv`, (out, in, *kernel).

    Groups run along the last dimension; a row that they do not divide ends with a shorter one.
    Codes of less than 8 bits are packed along it. For a convolution, which has no other layout, both
    would follow the few columns of its kernel, so groups and packed codes take the filters as one
    stream of numbers instead: a row is the whole filter, and where groups do not divide the filter,
    they span two.

    Args:
        fmt: the format.
        shape: of the weight.
        dtype: of the weight.
        conv: whether it holds the filters of a convolution.
    """
    numbers, group = registry.dtypes.get(fmt.dtype), fmt.group
    scale = _OWN.get(dtype, "float32") if fmt.scale_dtype == "own" else fmt.scale_dtype
    if not numbers.has_scale:  # nor anything else that a group could share
        scale, group = NO_SCALE if fmt.scale_dtype == "own" else scale, "row"
    layout = fmt.layout or ("plain" if numbers.bits >= 8 else fmt.packing)
    block: tuple[int, ...]
    if conv and (layout != "plain" or isinstance(group, int)):
        layout, filter_size = "flat", max(prod(shape[1:]), 1)
        sizes: dict[GroupSize, int] = {"tensor": WHOLE, "row": filter_size}
        block = (sizes[group] if isinstance(group, str) else min(group, filter_size),)
    elif conv:
        block = (WHOLE if group == "tensor" else 1, *[WHOLE] * (len(shape) - 1))
    elif group == "tensor":
        block = TENSOR
    else:
        block = (fmt.rows, WHOLE if isinstance(group, str) else group)
    return Spec(fmt.dtype, block, scale, fmt.zero_point, layout, fmt.act, fmt.options)


def is_conv(dense: Tensor, target: Target) -> bool:
    """Whether a parameter holds the filters of a convolution."""
    return isinstance(target.module, _ConvNd) or dense.dim() > 3


def matmul_unsupported_reason(weight: Tensor, target: Target) -> str | None:
    """Why a parameter takes part in no matmul that a `ComputeWeight` casts; None where it does."""
    if isinstance(target.module, (nn.Embedding, nn.EmbeddingBag)):
        return "a lookup has no product that could be in low precision"
    if reason := getattr(target.module, "own_products", ""):  # layers of other packages say so
        return str(reason)
    if weight.dim() not in (2, 3) or is_conv(weight, target):
        return (
            "low-precision products are defined for 2-D weights and for the 3-D ones of experts, not for "
            f"the {weight.dim()}-D ones of {type(target.module).__name__}"
        )
    if weight.dtype == torch.float64:
        return (
            "low-precision products accumulate in float32, which would round float64 weights; convert the "
            "model to float32 or bfloat16 first"
        )
    return None


def is_transposed(target: Target) -> bool:
    """Whether a parameter is a weight (in, out), which is multiplied as it is."""
    return target.name == "weight" and any(
        f"{c.__module__}.{c.__qualname__}" in _TRANSPOSED for c in type(target.module).__mro__
    )


def quantize_weight(
    dense: Tensor,
    fmt: WeightFormat,
    target: Target,
    encode: Callable[[Tensor, Spec], Tensor] | None = None,
) -> Tensor | Skip:
    """The quantized form of a parameter; activations are quantized in linear layers only.

    Args:
        dense: the parameter.
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
    if fmt.layout and (conv or dense.dim() < 2):
        role = "holds the filters of a convolution" if conv else "has one dimension"
        return Skip(f"it {role}, and the layout {fmt.layout!r} is for matrices that are multiplied")
    if fmt.act is not None and (role := _not_linear(dense, target, conv)):
        return Skip(f"{role}, and activations are quantized in linear layers only")
    spec = weight_spec(fmt, tuple(dense.shape), dense.dtype, conv=conv)
    quantized = (
        quantize_values(
            dense,
            spec,
            scale_method=fmt.scale_method,
            act_scale=fmt.act_scale,
            act_zero_point=fmt.act_zero_point,
        )
        if encode is None
        else encode(dense, spec)
    )
    return quantized.t() if transposed else quantized


def _not_linear(dense: Tensor, target: Target, conv: bool) -> str:
    """What the parameter is, if not the weight of a linear layer."""
    if conv:
        return "it holds the filters of a convolution"
    if isinstance(target.module, (nn.Embedding, nn.EmbeddingBag)):
        return "it is an embedding"
    if isinstance(target.module, nn.Bilinear):
        return "it is the weight of a bilinear form"
    if dense.dim() == 3:
        return "it holds the 3-D weights of experts"
    return ""

"""The kernel of `linear` for weights in tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor
from ao_core.ext import registry
from ao_core.ext.kernels import rounded_activations, static_qparams
from ao_kernels.cpu.codes import codes_of
from ao_kernels.cpu.grids import grid_of
from ao_kernels.cpu.library import isa, unavailable, want_alone
from ao_kernels.cpu.tiles import AFFINE, LAYOUTS, act_code, table_of

__all__ = [
    "LINEAR_KERNELS",
    "describe",
    "linear_by",
    "matmul_arguments",
    "refuses",
    "rounds_before",
    "stored_matmul",
    "tiles_linear",
]

#: dtypes of activations
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: up to so many rows of activations, nothing is gained by decoding weights beforehand; as in C++
STREAMED_ROWS = 4
#: where a weight keeps its matmul, among the kernels that it remembers
_KEY = "ao_kernels.cpu.linear"


def matmul_arguments(w: QTensor) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """What the C++ matmuls are told of a weight: its parts with the table, and numbers."""
    parts = w.parts
    grid, codes = grid_of(w.spec, w.stored_shape), codes_of(w.format)
    names = ("qdata", *AFFINE, "rowsum")
    tensors = (*(parts.get(name) for name in names), table_of(parts))
    act = act_code(w.spec.act, w.format)
    return tensors, (grid.n, codes.bits, grid.group, grid.span, codes.kind, act)


def rounds_before(w: QTensor) -> bool:
    """Whether activations are quantized before the matmul, which does not know their format."""
    return w.spec.act is not None and not act_code(w.spec.act, w.format)


def stored_matmul(w: QTensor, stored: int, fill: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The matmul with one weight, whose codes may not be stored as tiles, see `compact`."""
    op = torch.ops.ao_kernels.stored_linear.default
    (*weight, table), numbers = matmul_arguments(w)
    act = static_qparams(w) if numbers[-1] else (None, None)

    def matmul(x: Tensor, bias: Tensor | None) -> Tensor:
        return op(x, *weight, table, bias, *numbers, stored, fill, *act)  # type: ignore[no-any-return]

    return matmul


def _matmul(w: QTensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The matmul with one weight. Parts of a weight are written to, but never replaced."""
    if w.spec.act is not None and w.spec.act.is_static:
        return stored_matmul(w, 0, 0)
    op = torch.ops.ao_kernels.linear.default
    (*weight, table), numbers = matmul_arguments(w)
    qdata, scale, scale_outer, zero_point, offset, offset_outer, rowsum = weight
    n, bits, group, span, kind, act = numbers

    def matmul(x: Tensor, bias: Tensor | None) -> Tensor:
        return op(  # type: ignore[no-any-return]
            x, qdata, scale, scale_outer, zero_point, offset, offset_outer, rowsum, table, bias,
            n, bits, group, span, kind, act,
        )  # fmt: skip

    return matmul


def tiles_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """One call into C++."""
    return linear_by(_matmul, x, w, bias)


def linear_by(
    make: Callable[[QTensor], Callable[[Tensor, Tensor | None], Tensor]],
    x: Tensor,
    w: QTensor,
    bias: Tensor | None,
) -> Tensor:
    """By what `make` finds of the weight alone, once, at its first matmul."""
    found = w._bound.get(_KEY)
    if found is None:
        found = w._bound[_KEY] = make(w), rounds_before(w)
    matmul, rounds = found
    if not rounds:
        return matmul(x, bias)
    if x.dtype != torch.float16:
        return matmul(rounded_activations(x, w), bias)
    # as the reference: codes of numbers near the greatest float16 stand for greater ones
    wide = None if bias is None else bias.float()
    return matmul(rounded_activations(x.float(), w), wide).half()


def refuses(shape: str) -> Callable[[Call], str | None]:
    """A kernel's `refuses`, for weights of a shape such as "(N, K)"."""

    def refused(call: Call) -> str | None:
        if call.x_dtype not in DTYPES:
            return f"needs activations in float32, bfloat16 or float16, found {call.x_dtype}"
        if len(call.weight_shape) != len(shape.split(",")):
            return f"needs a weight {shape}, found {call.weight_shape}"
        return None

    return refused


def _in_tile_registers(call: Call) -> bool:
    """Whether the instruction set has registers that hold tiles, and they pay for such a call."""
    spec, codes = call.spec, codes_of(registry.dtypes.get(call.spec.dtype))
    act = act_code(spec.act, registry.dtypes.get(spec.dtype))
    group = grid_of(spec, call.weight_shape).group
    found: bool = torch.ops.ao_kernels.in_tile_registers(
        torch.tensor(codes.values), call.m, call.weight_shape[-1], group, codes.kind, act,
        spec.zero_point != "none", call.x_dtype,
    )  # fmt: skip
    return found


def describe(call: Call) -> str:
    """The instruction set, and what is done for so many rows with such activations."""
    if _in_tile_registers(call):
        how = "weights decoded into the cache, matmuls in tile registers"
    elif call.m <= STREAMED_ROWS:
        how = "weights decoded as they are read"
    else:
        how = "weights decoded into the cache, once for many rows"
    act, where = call.spec.act, ""
    if act is not None:
        inside = act_code(act, registry.dtypes.get(call.spec.dtype))
        where = (
            f", activations as {act.dtype} per token"
            if inside
            else f", activations as {act} before"
        )
    return f"{isa()}, {how}{where}"


LINEAR_KERNELS = tuple(
    Kernel(
        f"{layout.name}_linear", "linear", layout.name, "cpu", tiles_linear, 50, unavailable,
        refuses("(N, K)"), describe, alone=want_alone,
    )
    for layout in LAYOUTS
)  # fmt: skip

"""The kernels of `qkv` and `mlp` for weights in tiles: a decoder block in two calls into C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core import Kernel
from ao_core.ext.kernels import GAINS, GATES, BlockCall, Heads, NormBefore, Projection
from ao_kernels.cpu.library import isa, unavailable, want_alone
from ao_kernels.cpu.linear import DTYPES, matmul_arguments
from ao_kernels.cpu.tiles import LAYOUTS

__all__ = ["BLOCK_KERNELS", "NAMES", "weight_arguments"]

#: where a weight keeps what the ops are told of it, among the kernels that it remembers
_KEY = "ao_kernels.cpu.blocks"
# programs of AOTInductor pass no empty lists
_NO_WEIGHT = (*(None,) * 9, (0,))
_NO_NORM = (None, 0.0, 0)
#: of layouts of tiles
NAMES = tuple(layout.name for layout in LAYOUTS)


def weight_arguments(projection: Projection | None) -> tuple[Any, ...]:
    """The ten arguments of a weight."""
    if projection is None:
        return _NO_WEIGHT
    weight, bias = projection
    found = weight._bound.get(_KEY)
    if found is None:
        found = weight._bound[_KEY] = matmul_arguments(weight)
    tensors, numbers = found
    return (*tensors, bias, numbers)


def _norm(norm: NormBefore | None) -> tuple[Any, ...]:
    return _NO_NORM if norm is None else (norm.weight, norm.eps, GAINS.index(norm.gain))


def qkv(
    x: Tensor,
    norm: NormBefore | None,
    weight: Projection,
    cosine: Tensor,
    sine: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    """One call into C++."""
    op = torch.ops.ao_kernels.qkv.default
    return op(x, *_norm(norm), *weight_arguments(weight), cosine, sine, heads)  # type: ignore[no-any-return]


def mlp(
    x: Tensor,
    residual: Tensor | None,
    norm: NormBefore | None,
    output: Projection | None,
    gate_up: Projection,
    down: Projection,
    gate: str,
) -> Tensor:
    """One call into C++."""
    op = torch.ops.ao_kernels.mlp.default
    weights = (*weight_arguments(output), *weight_arguments(gate_up), *weight_arguments(down))
    return op(x, residual, *_norm(norm), *weights, GATES.index(gate))  # type: ignore[no-any-return]


def _refuses(call: BlockCall) -> str | None:
    if call.x_dtype not in DTYPES:
        return f"needs activations in float32, bfloat16 or float16, found {call.x_dtype}"
    others = [spec.layout for spec in call.specs if spec.layout not in NAMES]
    return f"needs all weights in tiles, found the layout {others[0]!r}" if others else None


def _describe(call: BlockCall) -> str:
    return f"{isa()}, {len(call.weights)} matmuls and all between them"


def _kernel(op: str, fn: Any, layout: str) -> Kernel:
    return Kernel(
        f"{layout}_{op}",
        op,
        layout,
        "cpu",
        fn,
        50,
        unavailable,
        _refuses,
        _describe,
        alone=want_alone,
    )


BLOCK_KERNELS = tuple(
    _kernel(op, fn, layout) for op, fn in (("qkv", qkv), ("mlp", mlp)) for layout in NAMES
)

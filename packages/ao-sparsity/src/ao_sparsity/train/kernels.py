"""The kernels of 2:4 training that need nothing but torch, and the ops that choose among all.

Both ops are looked up in the tables of ao-core, layout "two_four"; another package serves them by
registering a `Kernel` of the same signature:

- ``tile_mask(weight) -> mask``: see `ao_sparsity.train.tiles.tile_mask`; every kernel gives the same
  mask, up to the choice among patterns of equal sums
- ``semi_sparse_mm(a, b, mask, transposed) -> y``: a (M, C); b (N, C) with a mask that is 2:4 along both
  dimensions; y = a @ (b * mask).T (M, N). With `transposed`, b is (C, N) and y = a @ (b * mask)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.dispatch import run, select
from ao_core.records import Call, Kernel
from ao_core.spec import NO_SCALE, Spec
from ao_sparsity.train import tiles

__all__ = ["KERNELS", "is_emulated", "semi_sparse_mm", "straight_through_mm", "tile_mask"]

#: of a weight whose zeros move while it is trained: nothing of it is stored
_SPEC = Spec("bf16", (tiles.TILE, tiles.TILE), NO_SCALE, layout="two_four")
#: what the sizes of a product on sparse tensor cores are multiples of
_STEP = 16
#: rows of input for which the kernels of training are asked for
_ROWS = 4096


def _call(op: str, a: Tensor, weight: Tensor) -> Call:
    return Call(op, _SPEC, tuple(weight.shape), tuple(a.shape), a.dtype, a.device.type)


def is_emulated(weight: Tensor) -> bool:
    """Whether the products with what is kept of a weight fall to the reference."""
    rows = weight.new_empty((_ROWS, weight.shape[1]), device="meta")
    call = _call("semi_sparse_mm", rows, weight)
    return select(replace(call, device=weight.device.type)).priority < 0


@torch.library.custom_op("ao_sparsity::tile_mask", mutates_args=())
def tile_mask(weight: Tensor) -> Tensor:
    """The op "tile_mask" by the best kernel; one node of a graph, which is chosen when it runs."""
    return run(_call("tile_mask", weight, weight), weight)  # type: ignore[no-any-return]


@tile_mask.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)


def _multiply(a: Tensor, b: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    return run(_call("semi_sparse_mm", a, b), a, b, mask, transposed)  # type: ignore[no-any-return]


@torch.library.custom_op("ao_sparsity::semi_sparse_mm", mutates_args=())
def semi_sparse_mm(a: Tensor, b: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    """The op "semi_sparse_mm" by the best kernel; one node of a graph, which is chosen when it runs."""
    return _multiply(a, b, mask, transposed)


@semi_sparse_mm.register_fake
def _(a: Tensor, b: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1 if transposed else 0])


@torch.library.custom_op("ao_sparsity::straight_through_mm", mutates_args=())
def straight_through_mm(input: Tensor, weight: Tensor, mask: Tensor, decay: float) -> Tensor:
    """``input @ (weight * mask).T``, whose gradient of the weight is that of ``input @ weight.T``.

    Args:
        input: (M, K).
        weight: (N, K).
        mask: of the weight, 2:4 along both dimensions.
        decay: added to the gradient: so many times each weight that is not kept.
    """
    return _multiply(input, weight, mask, False)


@straight_through_mm.register_fake
def _(input: Tensor, weight: Tensor, mask: Tensor, decay: float) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.decay = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    input, weight, mask = ctx.saved_tensors
    grad_input = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_input = semi_sparse_mm(grad, weight, mask, True)
    if ctx.needs_input_grad[1]:
        grad_weight = grad.t() @ input
        if ctx.decay:
            grad_weight = grad_weight + ctx.decay * weight.masked_fill(mask, 0)
    return grad_input, grad_weight, None, None


straight_through_mm.register_autograd(_gradients, setup_context=_save)


def _reference(a: Tensor, b: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    kept = torch.where(mask, b, 0)
    return a @ (kept if transposed else kept.t())


def _tensor_cores(a: Tensor, b: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    """Compressed for each product, by cuSPARSELt: of the mask's two directions a product needs one."""
    kept = torch.where(mask, b, 0)
    sparse = torch.sparse.to_sparse_semi_structured(kept.t().contiguous() if transposed else kept)
    return F.linear(a, sparse)


def _has_sparse_tensor_cores() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if not torch.backends.cusparselt.is_available():
        return "needs a build of torch with cuSPARSELt"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"needs sm_80, found sm_{major}{minor}"


def _refuses_tensor_cores(call: Call) -> str | None:
    if call.x_dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 and float16, not {call.x_dtype}"
    if any(size % _STEP for size in call.weight_shape):
        return f"needs sizes that are multiples of {_STEP}, found {call.weight_shape}"
    return None if call.m else "needs a product that is not empty"


KERNELS = (
    Kernel("reference_tile_mask", "tile_mask", "two_four", "*", tiles.tile_mask, -100),
    Kernel("reference_semi_sparse_mm", "semi_sparse_mm", "two_four", "*", _reference, -100),
    Kernel(
        "torch_semi_sparse_mm",
        "semi_sparse_mm",
        "two_four",
        "cuda",
        _tensor_cores,
        0,
        _has_sparse_tensor_cores,
        _refuses_tensor_cores,
    ),
)

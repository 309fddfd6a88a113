"""The ops of 2:4 training, the kernels for them that need nothing but torch, and who calls them.

Another package serves an op by registering a `Kernel` for the layout "two_four".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Kernel, Op, Spec
from ao_core.ext.kernels import run, select
from ao_sparsity.kernels import no_cusparselt
from ao_sparsity.train import tiles

__all__ = [
    "KERNELS",
    "OPS",
    "MaskedCall",
    "is_emulated",
    "semi_sparse_mm",
    "straight_through_mm",
    "tile_mask",
]

#: what the sizes of a matmul on sparse tensor cores are multiples of
_STEP = 16
#: rows of input for which the kernels of training are asked for
_ROWS = 4096


@dataclass(frozen=True)
class MaskedCall:
    """What kernels of the ops of 2:4 training may look at; an `ao_core.OpCall`. All operands are dense."""

    #: "tile_mask" or "semi_sparse_mm"
    op: str
    #: of the weight as it is stored, dense
    weight_shape: tuple[int, ...]
    #: of the other operand; of "tile_mask" the weight itself
    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    device: str

    @property
    def m(self) -> int:
        """Rows of the other operand."""
        return self.x_shape[0]

    @property
    def layout(self) -> str:
        """The pattern of the mask."""
        return "two_four"

    @property
    def specs(self) -> tuple[Spec, ...]:
        """None: nothing is quantized, and the zeros move while the weight is trained."""
        return ()


def _call(op: str, a: Tensor, weight: Tensor) -> MaskedCall:
    return MaskedCall(op, tuple(weight.shape), tuple(a.shape), a.dtype, a.device.type)


def is_emulated(weight: Tensor) -> bool:
    """Whether the matmuls with what is kept of a weight fall to the reference."""
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
    """The matmul with the weight after its mask."""
    kept = torch.where(mask, b, 0)
    return a @ (kept if transposed else kept.t())


def _tensor_cores(a: Tensor, b: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    """Compressed for each matmul, by cuSPARSELt: of the mask's two directions a matmul needs one."""
    kept = torch.where(mask, b, 0)
    sparse = torch.sparse.to_sparse_semi_structured(kept.t().contiguous() if transposed else kept)
    return F.linear(a, sparse)


def _refuses_tensor_cores(call: MaskedCall) -> str | None:
    if call.x_dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 and float16, not {call.x_dtype}"
    if any(size % _STEP for size in call.weight_shape):
        return f"needs sizes that are multiples of {_STEP}, found {call.weight_shape}"
    return None if call.m else "needs a matmul that is not empty"


def _trials(name: str) -> Any:
    return lambda: getattr(import_module("ao_sparsity.train.trials"), name)


OPS = (
    Op(
        "tile_mask",
        MaskedCall,
        tiles.tile_mask,
        """True, bool (N, K), for what stays of a weight: 2:4 along its rows and along its columns at once.

        Eight of each 4 × 4 tile stay, two in each row and column: those whose magnitudes have the greatest
        sum. Among patterns of equal sums a kernel may choose any.
        """,
        _trials("TILE_MASK"),
    ),
    Op(
        "semi_sparse_mm",
        MaskedCall,
        _reference,
        """`y = a @ (b * mask).T`, or `y = a @ (b * mask)` where `transposed`, in the dtype of a.

        a is (M, K), b (N, K) and y (M, N); with `transposed`, a is (M, N), b (N, K) and y (M, K). The mask
        is bool in the shape of b, and 2:4 along both dimensions.
        """,
        _trials("SEMI_SPARSE_MM"),
    ),
)

KERNELS = (
    Kernel(
        "torch_semi_sparse_mm",
        "semi_sparse_mm",
        "two_four",
        "cuda",
        _tensor_cores,
        0,
        no_cusparselt,
        _refuses_tensor_cores,
    ),
)

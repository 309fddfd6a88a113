"""The kernel of `grouped_linear` for the weights of experts in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import rounded_activations
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.linear import matmul_arguments, refuses, rounds_before
from ao_kernels.cpu.tiles import LAYOUTS, act_code

__all__ = ["GROUPED_KERNELS", "tiles_grouped_linear"]


def tiles_grouped_linear(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
    """All experts in one call into C++."""
    tensors, numbers = matmul_arguments(w)
    dtype = x.dtype
    if rounds_before(
        w
    ):  # as the reference: codes of the greatest numbers in float16 stand for greater ones
        x = rounded_activations(x.float() if dtype == torch.float16 else x, w)
    out: Tensor = torch.ops.ao_kernels.grouped_linear(x, *tensors, offs, *numbers)
    return out.to(dtype)


def _refuses(call: Call) -> str | None:
    act = call.spec.act
    if act is not None and not act_code(act, registry.dtypes.get(call.spec.dtype)):
        blocks = [
            act.block,
            *([act.scale_dtype.block] if isinstance(act.scale_dtype, Spec) else []),
        ]
        if any(block[0] != 1 for block in blocks):
            return f"rounds the tokens of all experts together, which {act} does not"
    return refuses("(experts, N, K)")(call)


def _describe(call: Call) -> str:
    return f"{isa()}, expert by expert"


GROUPED_KERNELS = tuple(
    Kernel(
        f"{layout.name}_grouped_linear", "grouped_linear", layout.name, "cpu",
        tiles_grouped_linear, 50, unavailable, _refuses, _describe,
    )
    for layout in LAYOUTS
)  # fmt: skip

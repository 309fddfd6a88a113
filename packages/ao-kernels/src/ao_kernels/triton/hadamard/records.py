"""The kernel record of `hadamard`."""

from __future__ import annotations

from torch import Tensor

from ao_core import Call, Kernel
from ao_kernels.triton.hadamard.op import Shape, launch_shape, transform
from ao_kernels.triton.shared.device import unavailable
from ao_kernels.triton.shared.dtypes import INPUTS

__all__ = ["HADAMARD_KERNELS", "hadamard"]


def hadamard(x: Tensor, block: int, inverse: bool) -> Tensor:
    """As the op `hadamard` has it: the reference's bits where `block` is a power of two."""
    out: Tensor = transform(x, block, inverse)
    return out


def _refuses(call: Call) -> str | None:
    if call.x_dtype not in INPUTS:
        return f"reads bfloat16, float16 and float32, not {call.x_dtype}"
    shape = launch_shape(call.spec.block[-1])
    return shape if isinstance(shape, str) else None


def _describe(call: Call) -> str:
    shape = launch_shape(call.spec.block[-1])
    assert isinstance(shape, Shape)
    return f"{shape.blocks} blocks of {shape.order} × {shape.power}, {shape.warps} warps"


HADAMARD_KERNELS = (
    Kernel(
        "triton_hadamard",
        "hadamard",
        "plain",
        "cuda",
        hadamard,
        50,
        unavailable,
        _refuses,
        _describe,
    ),
)

"""The kernel record of `hadamard`."""

from __future__ import annotations

from torch import Tensor

from ao_core import Call, Kernel
from ao_kernels.triton.hadamard.op import Shape, launch_shape, transform
from ao_kernels.triton.shared.device import unavailable
from ao_kernels.triton.shared.dtypes import INPUTS
from ao_kernels.triton.shared.known_answer import MATMUL, Sample, noise, proven

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


def _sample(call: Call) -> Sample:
    """Three rows of two blocks; where a matrix is multiplied by, sums are in another order."""
    block = call.spec.block[-1]
    power = block & (block - 1) == 0

    def arguments() -> tuple[object, ...]:
        return noise((3, 2 * block), call.x_dtype), block, True

    return Sample((block, call.x_dtype), arguments, 0.0 if power else MATMUL)


HADAMARD_KERNELS = (
    Kernel(
        "triton_hadamard",
        "hadamard",
        "plain",
        "cuda",
        hadamard,
        50,
        unavailable,
        proven("hadamard", hadamard, _refuses, _sample),
        _describe,
    ),
)

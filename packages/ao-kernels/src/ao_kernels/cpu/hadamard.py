"""The kernel of `hadamard` on the CPU: butterflies in vectors, and small matmuls with Paley's matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel
from ao_core.ext.numerics import hadamard_factors
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.cpu.quantize import ELEMENTS

__all__ = ["HADAMARD_KERNELS", "hadamard"]

#: `kGreatestOrder` of csrc/cpu/hadamard/hadamard.h
_GREATEST_ORDER = 1024


def hadamard(x: Tensor, block: int, inverse: bool) -> Tensor:
    """H x / √block of every `block` elements, or with `inverse` Hᵀ x / √block.

    The bits of `numerics.hadamard_transform` where `block` is a power of two; otherwise sums over the
    columns of Paley's matrices are in float32, in their order. The same bits for any number of threads and
    all instruction sets.
    """
    out: Tensor = torch.ops.ao_kernels.hadamard(x, hadamard_factors(block), inverse)
    return out


def _refuses(call: Call) -> str | None:
    if call.x_dtype not in ELEMENTS:
        return f"reads float32, bfloat16 and float16, not {call.x_dtype}"
    *paley, _ = hadamard_factors(call.spec.block[-1])
    if paley and paley[0] > _GREATEST_ORDER:
        return f"multiplies by matrices of order {_GREATEST_ORDER} at most, found {paley[0]}"
    return None


def _describe(call: Call) -> str:
    factors = " × ".join(map(str, hadamard_factors(call.spec.block[-1])))
    return f"{isa()}, orders {factors}"


HADAMARD_KERNELS = (
    Kernel(
        "cpu_hadamard", "hadamard", "plain", "cpu", hadamard, 50, unavailable, _refuses, _describe
    ),
)

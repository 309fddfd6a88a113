"""The launch of the Hadamard transform: a block of the transform in the registers of a CTA."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext.kernels import neutral
from ao_core.ext.numerics import hadamard_factors, hadamard_matrix, hadamard_scales
from ao_kernels.triton.shared.device import on_device, supports_pdl
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.tile_config import options

__all__ = ["Shape", "launch_shape", "sign_bits", "transform"]

#: elements that a CTA holds at least, and at most: they pass through shared memory in float32
_FEWEST, _MOST = 2048, 16 * 1024
#: elements of a thread, and where there is a matrix of Paley's to multiply by, which needs more registers
_A_THREAD, _A_THREAD_MULTIPLIED = 32, 64
#: the greatest order of such a matrix
_GREATEST_ORDER = 64


class Shape(NamedTuple):
    """What a launch is compiled for."""

    blocks: int
    order: int
    padded: int
    power: int
    rounds: int
    warps: int

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments of the kernel."""
        names = ("BLOCKS", "ORDER", "PADDED", "POWER", "ROUNDS")
        return dict(zip(names, self, strict=False))


@lru_cache(maxsize=256)
def launch_shape(block: int) -> Shape | str:
    """How blocks of so many elements are transformed, or a sentence that says why they cannot be."""
    *paley, power = hadamard_factors(block)
    if len(paley) > 1 or (paley and paley[0] > _GREATEST_ORDER):
        return (
            f"multiplies by one matrix of order {_GREATEST_ORDER} at most besides powers of two, found "
            + " × ".join(map(str, paley))
        )
    order = paley[0] if paley else 1
    padded = max(16, 1 << (order - 1).bit_length()) if paley else 1
    if paley and power < 16:
        return f"multiplies matrices by 16 columns at least, found {power}"
    if padded * power > _MOST:
        return f"holds {_MOST} elements of a block at most, found {padded * power}"
    blocks = 1 if paley else max(1, _FEWEST // power)
    a_thread = _A_THREAD_MULTIPLIED if paley else _A_THREAD
    warps = max(2, blocks * padded * power // (32 * a_thread))
    return Shape(blocks, order, padded, power, power.bit_length() - 1, warps)


@lru_cache(maxsize=32)
def sign_bits(order: int, inverse: bool) -> tuple[int, ...]:
    """The Paley matrix in bits, an integer for each row: set where an element is -1.

    They are constants of the kernel. A tensor would be made by the first launch, which may be in memory that
    a CUDA graph takes back.
    """
    if order == 1:
        return ()
    with neutral():
        matrix = hadamard_matrix(order)
        rows = (matrix.T if inverse else matrix).tolist()
    return tuple(sum(1 << i for i, sign in enumerate(row) if sign < 0) for row in rows)


def _transform(x: Tensor, block: int, inverse: bool) -> Tensor:
    """H x / √block, or with `inverse` Hᵀ x / √block, of every `block` elements of x (…, K).

    Args:
        x: bfloat16, float16 or float32, on any device of Triton's.
        block: such that `launch_shape` has a shape for it.
        inverse: Hᵀ in place of H.
    """
    from ao_kernels.triton.hadamard import kernel

    shape = launch_shape(block)
    if isinstance(shape, str):
        raise ValueError(f"block={block}: hadamard_blocks {shape}")
    x = x.contiguous()
    y, blocks = torch.empty_like(x), x.numel() // block
    if blocks == 0:
        return y
    pdl = supports_pdl(x.device)
    with on_device(x):
        kernel.transform[(-(-blocks // shape.blocks),)](
            x, y, blocks, *hadamard_scales(block), **shape.constants,
            SIGNS=sign_bits(shape.order, inverse), PDL=pdl, **options(shape.warps, 1, pdl=pdl),
        )  # fmt: skip
    return y


transform = define(
    "hadamard_blocks(Tensor x, int block, bool inverse) -> Tensor",
    _transform,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)

"""What sparse layouts share: removed values are exactly 0, so every format must have a code for 0."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ao_core import Layout
from ao_core.ext.numerics import expand, pack_bits, unpack_bits

if TYPE_CHECKING:
    from ao_core import DType, Spec

__all__ = ["SparseLayout", "filled", "packed_codes", "unpacked_codes", "zero_codes"]


class SparseLayout(Layout):
    """A layout that stores some of the codes; the others are those of 0."""

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if dtype.kind == "codebook":
            return f"removed values are 0, and {dtype.name} learns values that need not include it"
        if spec.zero_point not in ("none", "int"):
            kinds = f"zero_point='none' or 'int', but not {spec.zero_point!r}"
            return f"removed values are exactly 0, as with {kinds}"
        if _code_of_zero(dtype) is None:
            return f"removed values are 0, and {dtype.name} has no code for it"
        return None


@lru_cache(maxsize=256)
def _code_of_zero(dtype: DType) -> float | None:
    with _disable_current_modes(), torch.inference_mode(False):
        code = dtype.encode(torch.zeros(1, device="cpu"))
        return code.item() if float(dtype.decode(code)) == 0 else None


def zero_codes(
    like: Tensor, zero_point: Tensor | None, spec: Spec, shape: tuple[int, ...], dtype: DType
) -> Tensor:
    """The code of 0 for each element of `shape`, on the device of `like`: the zero point, if there is one."""
    if zero_point is not None:
        return expand(zero_point, shape, spec.block).expand(shape)
    return torch.full(
        (1,), _code_of_zero(dtype) or 0, dtype=dtype.code_dtype, device=like.device
    ).expand(shape)


def filled(codes: Tensor, zeros: Tensor, steps: dict[int, int]) -> tuple[Tensor, Tensor]:
    """Codes, and those of 0, up to a multiple of a step along each of some dimensions; with those of 0."""
    for dim, step in steps.items():
        size = codes.shape[dim]
        if rest := -size % step:
            more = zeros.narrow(dim, size - 1, 1)
            more = more.expand(
                *(rest if d == dim % codes.dim() else -1 for d in range(codes.dim()))
            )
            codes, zeros = torch.cat([codes, more], dim), torch.cat([zeros, more], dim)
    return codes, zeros


def packed_codes(codes: Tensor, dtype: DType) -> Tensor:
    """Codes (…, n) as they are stored: in the storage dtype, or packed along the last dimension.

    As the layouts `plain` and `packed` do.
    """
    return pack_bits(codes, dtype.bits) if dtype.bits < 8 else codes.view(dtype.storage)


def unpacked_codes(stored: Tensor, n: int, dtype: DType) -> Tensor:
    """Inverse of `packed_codes`: `n` codes along the last dimension."""
    return unpack_bits(stored, dtype.bits, n) if dtype.bits < 8 else stored.view(dtype.code_dtype)

"""The mask of a weight, searched for again only when the weight has changed.

Whether it has is read off its values: `data`, gathered shards and kernels outside of torch change a weight
and leave its version. Sums of the bits of all rows and of all columns tell two weights apart; signs may
cancel in them, and do not matter to a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ao_core.ext.kernels import is_transforming
from ao_sparsity.train import kernels

__all__ = ["Known", "known_mask"]

#: bytes of a word of bits -> its dtype, the widest first
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Known(NamedTuple):
    """A mask, and what its weight looked like when it was found."""

    dtype: torch.dtype
    rows: Tensor
    columns: Tensor
    mask: Tensor


def known_mask(weight: Tensor, last: Known | None) -> Known | None:
    """The mask of `weight`, which is `last` where that is still right; None: none may be kept.

    Masks are kept on the processor, where the search takes longer than the matmul. Elsewhere a comparison
    would wait for the device; and what is traced or transformed has no values to look at.
    """
    if (
        weight.device.type != "cpu"
        or type(weight) is not Tensor
        or not weight.numel()
        or torch.compiler.is_compiling()
        or is_transforming()
        or _get_current_dispatch_mode() is not None
    ):
        return None
    # what is made in inference mode could not be saved for a backward pass later
    with torch.inference_mode(False), torch.no_grad():
        rows, columns = _sums(weight)
        if (
            last is not None
            and last.dtype == weight.dtype
            and torch.equal(last.rows, rows)
            and torch.equal(last.columns, columns)
        ):
            return last
        return Known(weight.dtype, rows, columns, kernels.tile_mask(weight))


def _sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    length = weight.shape[-1] * weight.element_size()
    bits = weight.view(next(word for size, word in _WORDS.items() if length % size == 0))
    return bits.sum(1), bits.sum(0)

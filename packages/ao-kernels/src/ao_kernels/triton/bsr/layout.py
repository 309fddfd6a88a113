"""The layout `bsr_sorted`: block-sparse weights with the order in which a matmul takes their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import DType, Layout, Spec
from ao_core.ext import Parts, blocksize_of
from ao_kernels.triton.shared.workspace import prepare

__all__ = ["BSR_LAYOUTS", "SIDES", "BsrSorted", "order_of"]

#: sides of the blocks that the kernel takes
SIDES = (16, 32, 64)


def order_of(crow_indices: Tensor) -> Tensor:
    """int32: the rows of blocks, the longest first, so that no long one is left for the end."""
    lengths = crow_indices[1:] - crow_indices[:-1]
    return lengths.argsort(descending=True, stable=True).to(torch.int32)


class BsrSorted(Layout):
    """As `bsr`, and beside it the order in which matmuls begin with the rows of blocks.

    - qdata, col_indices, crow_indices: as in `bsr`, of dense values
    - row_order: int32 (ceil(N / b),), the longest row first.
    """

    name = "bsr_sorted"
    canonical = False
    canonical_name = "bsr"
    auto_devices = ("cuda",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why the matmul cannot take such a tensor."""
        if dtype.kind != "dense":
            return f"holds bf16, fp16 and fp32, not {dtype.name}"
        if len(shape) != 2 or 0 in shape:
            return f"needs a weight of 2 dimensions that is not empty, found {shape}"
        if blocksize_of(spec) not in SIDES:
            return f"needs blocks of {SIDES} rows, found blocksize={blocksize_of(spec)}"
        return None if spec.act is None else "its matmul does not quantize activations"

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """With the order of rows."""
        prepare(parts["qdata"].device)
        return {**parts, "row_order": order_of(parts["crow_indices"])}

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Without it."""
        return {name: part for name, part in parts.items() if name != "row_order"}


BSR_LAYOUTS = (BsrSorted(),)

"""The layout `row_sums`: int8 weights with the sums of their rows, for activations with zero points."""

from __future__ import annotations

import torch

from ao_core import DType, Layout, Spec
from ao_core.ext import ROW, TENSOR, Parts
from ao_kernels.triton.shared.tiling import pad

__all__ = ["RowSums"]


class RowSums(Layout):
    """As `plain`, for an int8 weight (N, K) whose activations are uint8 with zero points.

    A zero point is taken off as that times the sum of each row of codes, for which a matmul would else read
    all of them once more. Parts:

    - qdata: int8 (N, K up to a multiple of 16), zeros at the ends of rows.
    - scale: as in `plain`.
    - sums: int32 (N,), those of the codes of a row.
    """

    name = "row_sums"
    canonical = False
    canonical_name = "plain"
    auto_devices = ("cuda",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """None, or a sentence that says why sums of rows are of no use to such a tensor."""
        act = spec.act
        if act is None or (act.dtype, act.zero_point) != ("uint8", "int"):
            return f"is for activations in uint8 with zero points, found {act}"
        if (spec.dtype, spec.zero_point) != ("int8", "none") or isinstance(spec.scale_dtype, Spec):
            return (
                f"holds int8 without zero points, with scales that are not quantized, found {spec}"
            )
        if len(shape) != 2 or 0 in shape:
            return f"needs a weight of 2 dimensions that is not empty, found {shape}"
        if spec.block not in (ROW, TENSOR):
            return f"needs one scale for a row, or for all, found {spec.block}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        """With the sums of rows."""
        codes = parts["qdata"]
        sums = codes.sum(1, dtype=torch.int32)
        return {**parts, "qdata": pad(codes, shape[0], -(-shape[1] // 16) * 16), "sums": sums}

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        """Without them."""
        return {"qdata": parts["qdata"][:, : shape[1]].contiguous(), "scale": parts["scale"]}

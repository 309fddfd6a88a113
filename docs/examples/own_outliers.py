"""A layout with parts that hold values of their own: outliers in bfloat16 next to the codes of the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ao_core import Spec, kernels, quantize_tensor, register
from ao_core.ext import SHARED, Packed, PartAxis
from ao_core.ext.numerics import sqnr

COLUMNS = 2


# --8<-- [start:layout]
class OutlierColumns(Packed):
    """The parts of `packed`; outliers, bfloat16 [N, 2]: whole columns; columns, int32 [2]: which."""

    name = "outlier_columns"
    affine = False  # a value is more than its code, scale and zero point

    def refuses(self, spec, shape, dtype):
        if len(shape) != 2 or shape[1] < COLUMNS:
            return f"needs a matrix of at least {COLUMNS} columns, found {shape}"
        if not dtype.has_scale:
            return f"splits off what spoils scales, and {dtype.name} has none"
        return super().refuses(spec, shape, dtype)

    def encode(self, values, spec, dtype, quantize):
        """Dense values -> parts. `quantize` finds scales for what is left."""
        magnitude = F.pad(values.float().abs(), (0, 0, 0, 1)).amax(0)  # 0 without rows
        columns = magnitude.topk(COLUMNS).indices.sort().values
        rest = values.index_fill(1, columns, 0)
        outliers = values.index_select(1, columns).to(torch.bfloat16)
        parts = super().encode(rest, spec, dtype, quantize)
        return {**parts, "outliers": outliers, "columns": columns.int()}

    def decode(self, parts, spec, shape, dtype, out_dtype=torch.float32):
        """Parts -> dense values."""
        dense = super().decode(parts, spec, shape, dtype)
        columns = parts["columns"].long()
        return dense.index_copy(1, columns, parts["outliers"].float()).to(out_dtype)

    def geometry(self, spec, shape, dtype):
        # a row of outliers belongs to each row; all rows share the places of the columns
        more = {"outliers": (PartAxis(1, 1),), "columns": (SHARED,)}
        return super().geometry(spec, shape, dtype) | more


# --8<-- [end:layout]

# --8<-- [start:use]
register(OutlierColumns())

generator = torch.Generator().manual_seed(0)
w, x = torch.randn(64, 96, generator=generator), torch.randn(4, 96, generator=generator)
w[:, [7, 50]] *= 50
for layout in ("packed", "outlier_columns"):
    q = quantize_tensor(w, Spec("nf4", (1, 32), "bfloat16", layout=layout))
    others = [column for column in range(96) if column not in (7, 50)]
    error = sqnr(w[:, others], q.dequantize()[:, others])
    print(f"{layout:16} {error:4.1f} dB, {q.stored_bytes} bytes")

# all that reads or writes dense values goes through the layout
values = q.dequantize()
with kernels("reference"):
    torch.testing.assert_close(F.linear(x, q), x @ values.T, atol=1e-3, rtol=1e-5)
q.add_(torch.zeros_like(values))
assert sqnr(values, q.dequantize()) > 60
# --8<-- [end:use]

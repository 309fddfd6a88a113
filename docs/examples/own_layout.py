"""Two layouts of your own: one that may stand in checkpoints, and one made for a kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ao_core import Layout, Spec, quantize_tensor, register
from ao_core.ext import PartAxis, UnsupportedOp, grid_axes, make_parts, to_layout


# --8<-- [start:canonical]
class Halves(Layout):
    """qdata: uint8 [..., K / 2], byte j of a row holding codes j (low nibble) and j + K / 2 (high)."""

    name = "halves"

    def refuses(self, spec, shape, dtype):
        if dtype.bits != 4:
            return f"holds 4-bit codes, not the {dtype.bits}-bit ones of {spec.dtype}"
        if shape[-1] % 2:
            return f"needs an even number of columns, found {shape}"
        return None

    def pack(self, codes, scale, zero_point, spec, dtype):
        low, high = codes.chunk(2, dim=-1)
        return make_parts(low | (high << 4), scale, zero_point)

    def unpack(self, parts, spec, shape, dtype):
        qdata = parts["qdata"]
        codes = torch.cat([qdata & 15, qdata >> 4], dim=-1)
        return codes, parts["scale"], parts.get("zero_point")

    def geometry(self, spec, shape, dtype):
        grid = grid_axes(spec, shape)
        # along every dimension but the last, one entry of qdata belongs to one index; the last has no
        # axis: there, a byte holds two codes that are far from each other
        rows = (PartAxis(values=1, entries=1),) * (len(shape) - 1)
        return {"qdata": rows, "scale": grid, "zero_point": grid}


# --8<-- [end:canonical]


# --8<-- [start:kernels]
class HalvesByColumn(Layout):
    """The same bytes, transposed: what a kernel wants that walks along K with many rows at once."""

    name = "halves_by_column"
    canonical = False
    canonical_name = "halves"

    def refuses(self, spec, shape, dtype):
        return None if len(shape) == 2 else f"needs a 2-D weight, found {shape}"

    def from_canonical(self, parts, spec, shape, dtype):
        return {**parts, "qdata": parts["qdata"].t().contiguous()}

    def to_canonical(self, parts, spec, shape, dtype):
        return {**parts, "qdata": parts["qdata"].t().contiguous()}


# --8<-- [end:kernels]

# --8<-- [start:use]
register(Halves())
register(HalvesByColumn())

generator = torch.Generator().manual_seed(0)
w, x = torch.randn(8, 64, generator=generator), torch.randn(4, 64, generator=generator)
halves = quantize_tensor(
    w, Spec("uint4", (1, 32), "bfloat16", zero_point="int", layout="halves")
)
values = halves.dequantize()
print(halves)

# slicing, joining, sharding and lookups follow from the geometry ...
assert torch.equal(halves[2:5].dequantize(), values[2:5])
assert torch.equal(torch.cat([halves[:3], halves[3:]]).dequantize(), values)

# ... and what it does not declare is refused by name
try:
    halves[:, :32]
except UnsupportedOp as error:
    print(error)

# matmuls work at once: the reference kernel serves every layout
torch.testing.assert_close(F.linear(x, halves), x @ values.T, atol=1e-5, rtol=1e-5)

# the kernel's layout holds the same codes and scales, bit for bit, there and back
by_column = to_layout(halves, "halves_by_column")
assert by_column.qdata.shape == (32, 8)
assert torch.equal(by_column.dequantize(), values)
assert torch.equal(by_column.canonical().qdata, halves.qdata)
# --8<-- [end:use]

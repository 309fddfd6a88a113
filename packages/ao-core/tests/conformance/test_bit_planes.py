"""A stranger's layout for a kernel, of integers of any width: plane b holds bit b of 8 codes in each byte.

Those of 8 bits come from `plain`, all others from `packed`: one layout with two canonical ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ao_core import WHOLE, Kernel, Spec, WeightOnlyConfig, quantize_, quantize_tensor
from ao_core.layouts import Layout
from ao_core.numerics import pack_bits, unpack_bits
from ao_core.tensor import to_layout
from ao_core.testing import LayoutSuite
from ao_core.testing.base import gaussian
from ao_core.testing.registered import registered


class BitPlanes(Layout):
    """qdata: uint8 [bits, ..., ceil(K / 8)]; scale and zero as the canonical layout has them."""

    name = "bit_planes"
    canonical = False
    auto_devices = ("cpu",)

    def canonical_of(self, spec, dtype):
        return "plain" if dtype.bits == 8 else "packed"

    def refuses(self, spec, shape, dtype):
        return None if dtype.kind == "int" else f"holds integers, not {dtype.name}"

    def from_canonical(self, parts, spec, shape, dtype):
        codes = parts["qdata"].view(torch.uint8)
        if dtype.bits < 8:
            codes = unpack_bits(codes, dtype.bits, shape[-1])
        planes = [pack_bits(codes >> bit & 1, 1) for bit in range(dtype.bits)]
        return {**parts, "qdata": torch.stack(planes)}

    def to_canonical(self, parts, spec, shape, dtype):
        planes = unpack_bits(parts["qdata"], 1, shape[-1]).unbind()
        codes = sum((plane << bit for bit, plane in enumerate(planes)), torch.zeros_like(planes[0]))
        qdata = pack_bits(codes, dtype.bits) if dtype.bits < 8 else codes.view(dtype.storage)
        return {**parts, "qdata": qdata}


def linear(x, w, bias):
    return F.linear(x, w.dequantize(x.dtype), bias)


RECORDS = (
    BitPlanes(),
    Kernel("bit_planes_linear", "linear", "bit_planes", "cpu", linear, 1),
)


class TestBitPlanes(LayoutSuite):
    records = RECORDS
    layout = "bit_planes"
    specs = (
        Spec("int8", (1, WHOLE)),
        Spec("uint4", (1, 16), "bfloat16", zero_point="int"),
        Spec("int3", (1, 8), "float16", zero_point="float"),
    )
    shapes = ((16, 64), (33, 70), (3, 8, 40))


def test_one_layout_serves_weights_of_several_canonical_ones(own_records):
    x = gaussian((3, 64))
    with registered(*RECORDS):
        for dtype, layout in (("int8", "plain"), ("int5", "packed")):
            model = nn.Linear(64, 16)
            quantize_(model, WeightOnlyConfig(dtype, 32))
            assert model.weight.spec.layout == "bit_planes"
            canonical = model.weight.canonical()
            assert canonical.spec.layout == layout
            assert torch.equal(to_layout(canonical, "bit_planes").qdata, model.weight.qdata)
            assert torch.equal(model(x), F.linear(x, canonical.dequantize(), model.bias))
        # another arrangement of the same format is not what it converts from
        other = quantize_tensor(gaussian((16, 64)), Spec("int8", (1, WHOLE), layout="packed"))
        assert other.canonical().spec.layout == "packed"

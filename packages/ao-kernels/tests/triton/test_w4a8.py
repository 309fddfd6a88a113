"""The layout `plane32`, and which matmuls its kernels take; their numbers are in proofs/interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import WHOLE, Call, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.testing import LayoutSuite
from ao_core.testing.base import gaussian, same_bits
from ao_kernels.triton.w4a8.launch import tile_config_of
from ao_kernels.triton.w4a8.layout import stored

ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
INT8, UINT8, FLOAT8 = Spec("int8", ROW), Spec("uint8", ROW, zero_point="int"), Spec("f8e4m3", ROW)


class TestPlane32(LayoutSuite):
    layout = "plane32"
    specs = (
        Spec("int4", (1, 32), "bfloat16", act=INT8),
        Spec("uint4", (1, 64), "float16", "int", act=FLOAT8),
    )
    shapes = ((33, 70),)


def test_where_each_code_lies():
    """Byte 16q + 4i + c of a row has column 4q + c of planes 2i and 2i + 1."""
    spec = Spec("uint4", (1, 64), zero_point="int", layout="packed", act=FLOAT8)
    q = quantize_tensor(gaussian((130, 300)), spec)
    words = to_layout(q, "plane32").qdata
    assert words.shape == (2, 2, 128, 32)
    found = words.view(torch.uint8).to(torch.int32).view(2, 2, 128, 8, 4, 4)
    codes = torch.zeros(256, 512, dtype=torch.int32)
    scale, zero_point = q.scale.repeat_interleave(64, 1), q.zero_point.repeat_interleave(64, 1)
    values = q.dequantize(torch.float32) / scale[:, :300] + zero_point[:, :300]
    codes[:130, :300] = values.round().to(torch.int32)
    for plane in range(8):
        expected = codes.view(2, 128, 2, 8, 8, 4)[:, :, :, plane].transpose(1, 2)
        assert torch.equal(found[..., plane // 2, :] >> 4 * (plane % 2) & 15, expected)


@pytest.mark.parametrize("group", [32, 64, 128, 256, 300, WHOLE])
@pytest.mark.parametrize("act", [INT8, UINT8, FLOAT8], ids=str)
@pytest.mark.parametrize(
    ("name", "zero_point"), [("int4", "none"), ("uint4", "int"), ("uint4", "float")]
)
def test_and_back(group, act, name, zero_point):
    """Bit for bit, whatever is padded; and sums of rows are those of the values."""
    for shape in ((130, 300), (1, 1), (128, 256)):
        spec = Spec(name, (1, group), "float16", zero_point, "packed", act=act)
        q = quantize_tensor(gaussian(shape) + 0.1, spec)
        there = to_layout(q, "plane32")
        assert ("sums" in there.part_names) == (act == UINT8)
        back = to_layout(there, "packed")
        assert back.part_names == q.part_names
        assert all(same_bits(back.parts[part], q.parts[part]) for part in q.part_names)
        if act == UINT8:
            values = q.dequantize(torch.float32).double()
            sums = there.sums.view(-1)
            error = (sums[: shape[0]].double() - values.sum(1)).abs()
            # the values themselves are rounded to float32, the sums once more
            assert (error <= 2.0**-22 * values.abs().sum(1)).all()
            assert not sums[shape[0] :].any()


def test_what_is_stored_for_padding_is_zero():
    """Activations beside it do not matter then, whatever the offset."""
    for name, zero_point in (("int4", "none"), ("uint4", "int")):
        for act in (INT8, FLOAT8):
            spec = Spec(name, (1, 32), zero_point=zero_point, layout="packed", act=act)
            words = to_layout(quantize_tensor(gaussian((1, 1)) + 9, spec), "plane32").qdata
            assert (words != 0).sum() <= 1


@pytest.mark.parametrize("name", ["int4", "uint4"])
@pytest.mark.parametrize("integers", [True, False])
def test_codes_are_turned_and_back(name, integers):
    codes = torch.arange(16, dtype=torch.uint8)
    how = stored(name, integers=integers)
    assert sorted(how.turn(codes).tolist()) == codes.tolist()
    assert torch.equal(how.turn(how.turn(codes)), codes)


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (Spec("int4", (1, 64)), (16, 64), "whose activations are quantized"),
        (Spec("int4", (1, 64), act=Spec("f8e5m2", ROW)), (16, 64), "f8e4m3, found f8e5m2"),
        (
            Spec("int4", (1, 64), act=Spec("uint8", ROW, zero_point="float")),
            (16, 64),
            "zero points",
        ),
        (Spec("uint4", (1, 64), act=INT8), (16, 64), "uint4 with zero points"),
        (Spec("int4", (1, 64), zero_point="int", act=INT8), (16, 64), "uint4 with zero points"),
        (Spec("int3", (1, 64), act=INT8), (16, 64), "holds int4"),
        (Spec("int4", (1, 64), "e8m0", act=INT8), (16, 64), "found e8m0"),
        (Spec("int4", (1, 48), act=INT8), (16, 96), "needs groups of"),
        (Spec("int4", (2, 64), act=INT8), (16, 64), "needs groups of"),
        (Spec("int4", (1, 1, 64), act=INT8), (2, 16, 64), "2-D weight"),
    ],
)
def test_what_does_not_fit(spec, shape, words):
    layout = registry.layouts.get("plane32")
    assert words in layout.refuses(spec, shape, registry.dtypes.get(spec.dtype))


def reason(numbers, spec, shape=(48, 64), dtype=torch.bfloat16):
    kernel = registry.kernels.get(f"triton_{numbers}_int4_linear")
    spec = replace(spec, layout="plane32")
    return kernel.refuses(Call("linear", spec, shape, (20, shape[1]), dtype, "cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_each_kernel_takes(dtype):
    integers = [Spec("int4", (1, 32), act=act) for act in (INT8, UINT8)]
    integers.append(Spec("int4", (1, 32), act=Spec("int8", TENSOR, static=True)))
    floats = Spec("uint4", (1, 32), zero_point="int", act=FLOAT8)
    for spec in integers:
        assert reason("int8", spec, dtype=dtype) is None
        assert "in f8e4m3, found" in reason("float8", spec)
    assert reason("float8", floats, dtype=dtype) is None
    assert "in int8 or uint8, found" in reason("int8", floats)


def test_what_they_refuse():
    spec = Spec("int4", (1, 32), act=INT8)
    assert "not torch.float64" in reason("int8", spec, dtype=torch.float64)
    by_groups = replace(spec, act=Spec("int8", (1, 32)))
    assert "one scale per row" in reason("int8", by_groups)
    nested = replace(spec, act=Spec("int8", ROW, Spec("f8e4m3", TENSOR)))
    assert "one scale per row" in reason("int8", nested)
    rows = replace(spec, block=ROW)
    assert "may pass" in reason("int8", rows, (8, 1 << 17))
    assert reason("int8", rows, (8, (1 << 17) - 1)) is None
    assert reason("int8", spec, (8, 1 << 17)) is None
    assert reason("float8", replace(rows, act=FLOAT8), (8, 1 << 17)) is None


def test_regimes():
    assert [tile_config_of(m).block_m for m in (1, 16, 17, 64, 65, 4096)] == [
        16,
        16,
        32,
        64,
        128,
        128,
    ]
    assert [tile_config_of(m, zero_point=True).block_m for m in (16, 65, 4096)] == [16, 64, 64]

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.ext import FLOATS
from ao_quant import configs as c

LINEAR = (48, 96)


def test_int8_is_plain_with_a_scale_a_row_in_the_dtype_of_the_parameter():
    for dtype, name in [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float64, "float32"),
    ]:
        assert c.Int8WeightOnlyConfig().spec(LINEAR, dtype) == Spec("int8", (1, WHOLE), name)


@pytest.mark.parametrize("group", [32, 64, 128, 256, "row"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_is_packed_with_bfloat16_scales(group, symmetric):
    spec = c.Int4WeightOnlyConfig(group, symmetric).spec(LINEAR, torch.float32)
    assert spec.layout == "packed"
    assert spec.block == (1, WHOLE if group == "row" else group)
    assert spec.scale_dtype == "bfloat16"
    assert (spec.dtype, spec.zero_point) == (("int4", "none") if symmetric else ("uint4", "int"))


@pytest.mark.parametrize("bits", range(1, 9))
def test_intx_packs_below_8_bits(bits):
    spec = c.IntxWeightOnlyConfig(bits).spec(LINEAR, torch.float32)
    assert spec.dtype == f"uint{bits}"
    assert spec.layout == ("plain" if bits == 8 else "packed")
    stored = quantize_tensor(torch.randn(64, 1024), spec).stored_bytes
    assert stored == 64 * 1024 * bits // 8 + 64 * 8 * 3


def test_nf4_quantizes_its_scales_unless_told_not_to():
    w = torch.randn(64, 1024)
    double = c.NF4WeightOnlyConfig().spec(w.shape, w.dtype)
    single = c.NF4WeightOnlyConfig(double_quant=False).spec(w.shape, w.dtype)
    assert isinstance(double.scale_dtype, Spec)
    assert double.block == single.block == (1, 64)
    assert quantize_tensor(w, double).stored_bytes == w.numel() // 2 + w.numel() // 64 + 4
    assert quantize_tensor(w, single).stored_bytes == w.numel() // 2 + w.numel() // 64 * 4


@pytest.mark.parametrize(
    ("granularity", "block", "scale"),
    [
        ("row", (1, WHOLE), "float32"),
        ("tensor", (WHOLE, WHOLE), "float32"),
        ("group", (1, 64), "bfloat16"),
    ],
)
def test_float8_granularities(granularity, block, scale):
    config = c.Float8WeightOnlyConfig("e5m2", granularity, group_size=64)
    assert config.spec(LINEAR, torch.bfloat16) == Spec("f8e5m2", block, scale)


def test_dynamic_formats_describe_their_activations():
    token = (1, WHOLE)
    symmetric = c.Int8DynamicActivationInt8WeightConfig().spec(LINEAR, torch.float32)
    assert symmetric.act == Spec("int8", token)
    config = c.Int8DynamicActivationInt8WeightConfig(symmetric_activations=False)
    assert config.spec(LINEAR, torch.float32).act == Spec("uint8", token, zero_point="int")
    int4 = c.Int8DynamicActivationInt4WeightConfig().spec(LINEAR, torch.float32)
    assert (int4.dtype, int4.block, int4.zero_point) == ("int4", (1, 32), "none")
    assert int4.act == Spec("uint8", token, zero_point="int")
    for granularity in ("row", "tensor"):
        config = c.Float8DynamicActivationFloat8WeightConfig(granularity)
        act = config.spec(LINEAR, torch.float32).act
        for rows in (1, 5):
            scales = quantize_tensor(torch.randn(rows, 7), act).scale
            assert scales.shape == (1 if granularity == "tensor" else rows, 1)


def test_static_formats_are_the_dynamic_ones_with_one_scale():
    tensor = (WHOLE, WHOLE)
    int8 = c.Int8StaticActivationInt8WeightConfig()
    assert int8.spec(LINEAR, torch.bfloat16) == Spec(
        "int8", (1, WHOLE), "bfloat16", act=Spec("int8", tensor, static=True)
    )
    asymmetric = c.Int8StaticActivationInt8WeightConfig(symmetric_activations=False)
    act = asymmetric.spec(LINEAR, torch.float32).act
    assert act == Spec("uint8", tensor, zero_point="int", static=True)
    for granularity, block in (("row", (1, WHOLE)), ("tensor", tensor)):
        config = c.Float8StaticActivationFloat8WeightConfig(granularity, "e5m2", act_scale=0.5)
        spec = config.spec(LINEAR, torch.float32)
        assert spec == Spec("f8e5m2", block, act=Spec("f8e4m3", tensor, static=True))


def test_the_scales_of_static_nvfp4_share_one_that_is_given():
    config = c.NVFP4StaticActivationNVFP4WeightConfig(act_scale=0.5)
    dynamic = c.NVFP4DynamicActivationNVFP4WeightConfig().spec(LINEAR, torch.float32)
    shared = Spec("f8e4m3", (WHOLE, WHOLE), static=True)
    assert config.spec(LINEAR, torch.float32) == replace(
        dynamic, act=replace(dynamic.act, scale_dtype=shared)
    )


def test_int8_with_one_scale_for_a_tensor():
    tensor = (WHOLE, WHOLE)
    for config, act in (
        (c.Int8DynamicActivationInt8WeightConfig(granularity="tensor"), Spec("int8", tensor)),
        (
            c.Int8StaticActivationInt8WeightConfig(granularity="tensor", act_scale=0.5),
            Spec("int8", tensor, static=True),
        ),
    ):
        spec = config.spec(LINEAR, torch.float32)
        assert (spec.dtype, spec.block, spec.act) == ("int8", tensor, act)


@pytest.mark.parametrize(
    "config",
    [
        c.Int4WeightOnlyConfig(32, zero_point="float"),
        c.IntxWeightOnlyConfig(4, 32, symmetric=False, zero_point="float"),
        c.UIntxWeightOnlyConfig(4, 32, zero_point="float"),
    ],
    ids=lambda config: type(config).__name__,
)
def test_float_zero_points_fit_ranges_better(config, sqnr_db):
    """About 0.4 dB of uniform weights in groups of 32, beside zero points that are codes."""
    x = torch.rand(256, 512) - 0.4
    spec = config.spec(x.shape, x.dtype)
    assert (spec.dtype, spec.zero_point) == ("uint4", "float")
    whole = replace(config, zero_point="int").spec(x.shape, x.dtype)
    gain = sqnr_db(x, quantize_tensor(x, spec).dequantize()) - sqnr_db(
        x, quantize_tensor(x, whole).dequantize()
    )
    assert 0.1 < gain < 1


def test_mx_activations_round_scales_up_by_default(sqnr_db):
    """By the floor of the specification elements near the end of a block's range saturate."""
    x = torch.rand(64, 512) + 1
    found = {}
    for mode in (None, "floor"):
        config = c.MXDynamicActivationMXWeightConfig(**({"scaling_mode": mode} if mode else {}))
        act = config.spec(LINEAR, torch.float32).act
        found[mode] = sqnr_db(x, quantize_tensor(x, act).dequantize())
    assert found[None] > found["floor"] + 1


def test_experts_have_a_scale_for_each_row_or_matrix_of_each_expert():
    shape = (3, 8, 64)
    row = c.Int8WeightOnlyConfig().spec(shape, torch.float32)
    assert quantize_tensor(torch.randn(shape), row).scale.shape == (3, 8, 1)
    group = c.Int4WeightOnlyConfig(32).spec(shape, torch.float32)
    assert quantize_tensor(torch.randn(shape), group).scale.shape == (3, 8, 2)
    whole = c.Float8WeightOnlyConfig(granularity="tensor").spec(shape, torch.float32)
    assert quantize_tensor(torch.randn(shape), whole).scale.shape == (3, 1, 1)


def test_filters_keep_8_bits_in_place_and_pack_the_rest_as_one_stream():
    shape = (8, 6, 3, 3)
    int8 = c.Int8WeightOnlyConfig().spec(shape, torch.float32, conv=True)
    assert int8 == Spec("int8", (1, WHOLE, WHOLE, WHOLE))
    tensor = c.Float8WeightOnlyConfig(granularity="tensor").spec(shape, torch.float32, conv=True)
    assert tensor.block == (WHOLE,) * 4
    for group, extent in [(32, 32), (64, 54), ("row", 54)]:
        spec = c.Int4WeightOnlyConfig(group, symmetric=True).spec(shape, torch.float32, conv=True)
        assert (spec.layout, spec.block) == ("flat", (extent,))
        q = quantize_tensor(torch.randn(shape), spec)
        assert q.stored_bytes == 8 * 54 // 2 + -(-8 * 54 // extent) * 2


def test_integers_in_blocks_and_tensors():
    x = torch.randn(70, 96)
    for symmetric, name, zero_point in ((True, "int5", "none"), (False, "uint5", "int")):
        block = c.IntxWeightOnlyConfig(5, 32, symmetric, block_rows=16)
        spec = block.spec(x.shape, x.dtype)
        assert spec == Spec(name, (16, 32), "bfloat16", zero_point, "packed")
        assert quantize_tensor(x, spec).scale.shape == (5, 3)
        whole = c.IntxWeightOnlyConfig(5, "tensor", symmetric).spec(x.shape, x.dtype)
        assert whole == Spec(name, (WHOLE, WHOLE), "bfloat16", zero_point, "packed")
        assert quantize_tensor(x, whole).scale.shape == (1, 1)
    conv = block.spec((8, 6, 3, 3), torch.float32, conv=True)
    assert (conv.layout, conv.block) == ("flat", (32,))
    same = c.UIntxWeightOnlyConfig(3, 128).spec(x.shape, x.dtype)
    assert same == c.IntxWeightOnlyConfig(3, 128).spec(x.shape, x.dtype)


def test_bitnet_takes_the_mean_magnitude():
    x = torch.randn(33, 77)
    for per_byte, layout in ((4, "packed"), (5, "digits")):
        config = c.BitNetWeightOnlyConfig(trits_per_byte=per_byte)
        q = quantize_tensor(x, config.spec(x.shape, x.dtype))
        assert q.spec.layout == layout
        scale = x.double().abs().mean().to(torch.bfloat16)
        assert torch.equal(q.scale, scale.reshape(1, 1))
        expected = (x.double() / scale.double()).round().clamp(-1, 1) * scale.double()
        assert torch.equal(q.dequantize().double(), expected)
    assert quantize_tensor(torch.zeros(4, 8), q.spec).dequantize().abs().max() == 0
    filters = config.spec((8, 6, 3, 3), torch.float32, conv=True)
    assert (filters.layout, filters.block) == ("flat", (WHOLE,))


@pytest.mark.parametrize(("ebits", "mbits"), FLOATS, ids=str)
def test_floats_of_every_width(ebits, mbits):
    x = torch.randn(9, 77)
    bits = 1 + ebits + mbits
    spec = c.FPXWeightOnlyConfig(ebits, mbits).spec(x.shape, x.dtype)
    layout = "plain" if bits == 8 else "packed"
    assert spec == Spec(f"f{bits}e{ebits}m{mbits}", (1, WHOLE), layout=layout)
    group = c.FPXWeightOnlyConfig(ebits, mbits, 32).spec(x.shape, x.dtype)
    assert (group.block, group.scale_dtype) == ((1, 32), "bfloat16")
    assert quantize_tensor(x, spec).dequantize().abs().amax(1) == pytest.approx(x.abs().amax(1))


def test_fp6_llm_and_fp4_are_floats():
    args = (LINEAR, torch.float32)
    assert c.FP6LLMWeightOnlyConfig().spec(*args) == c.FPXWeightOnlyConfig(3, 2).spec(*args)
    fp4 = c.FPXWeightOnlyConfig(2, 1, 64).spec(*args)
    assert (
        c.FP4WeightOnlyConfig().spec(*args)
        == fp4
        == Spec("f4e2m1", (1, 64), "bfloat16", layout="packed")
    )


def test_float8_in_blocks(sqnr_db):
    """A scale for 128 x 128 weights and for 128 elements of a token, as DeepSeek-V3 has them."""
    w, x = torch.randn(150, 300), torch.randn(5, 300)
    config = c.Float8DynamicActivationFloat8WeightConfig("block", activation_dtype="e5m2")
    spec = config.spec(w.shape, w.dtype)
    assert spec == Spec("f8e4m3", (128, 128), act=Spec("f8e5m2", (1, 128)))
    only = c.Float8WeightOnlyConfig(granularity="block").spec(w.shape, w.dtype)
    assert only == Spec("f8e4m3", (128, 128))
    expected = torch.empty_like(w)
    for rows in (slice(0, 128), slice(128, 150)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, 300)):
            tile = w[rows, columns]
            scale = tile.abs().max() / 448
            expected[rows, columns] = (tile / scale).to(torch.float8_e4m3fn).float() * scale
    q = quantize_tensor(w, spec)
    assert q.scale.shape == (2, 3)
    assert torch.equal(q.dequantize(), expected)
    pieces = []
    for part in x.split(128, 1):
        scale = part.abs().amax(1, keepdim=True) / 57344
        pieces.append((part / scale).to(torch.float8_e5m2).float() * scale)
    matmul = torch.cat(pieces, 1).double() @ expected.double().t()
    assert sqnr_db(matmul, torch.nn.functional.linear(x, q)) > 110


def test_e5m2_activations_and_weights():
    config = c.Float8DynamicActivationFloat8WeightConfig("row", "e5m2", "e5m2")
    row = Spec("f8e5m2", (1, WHOLE))
    assert config.spec(LINEAR, torch.float32) == replace(row, act=row)

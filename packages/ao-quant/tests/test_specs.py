from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Config, Spec
from ao_core.errors import ConfigError
from ao_core.tensor import quantize_tensor
from ao_quant import configs as c
from ao_quant import spec_of

LINEAR = (48, 96)


def test_int8_is_plain_with_a_scale_a_row_in_the_dtype_of_the_parameter():
    for dtype, name in [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float64, "float32"),
    ]:
        assert spec_of(c.Int8WeightOnlyConfig(), LINEAR, dtype) == Spec("int8", (1, WHOLE), name)


@pytest.mark.parametrize("group", [32, 64, 128, 256, "row"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_is_packed_with_bfloat16_scales(group, symmetric):
    spec = spec_of(c.Int4WeightOnlyConfig(group, symmetric), LINEAR, torch.float32)
    assert spec.layout == "packed"
    assert spec.block == (1, WHOLE if group == "row" else group)
    assert spec.scale_dtype == "bfloat16"
    assert (spec.dtype, spec.zero) == (("int4", "none") if symmetric else ("uint4", "int"))


@pytest.mark.parametrize("bits", range(1, 9))
def test_intx_packs_below_8_bits(bits):
    spec = spec_of(c.IntxWeightOnlyConfig(bits), LINEAR, torch.float32)
    assert spec.dtype == f"uint{bits}"
    assert spec.layout == ("plain" if bits == 8 else "packed")
    stored = quantize_tensor(torch.randn(64, 1024), spec).stored_bytes
    assert stored == 64 * 1024 * bits // 8 + 64 * 8 * 3


def test_nf4_quantizes_its_scales_unless_told_not_to():
    w = torch.randn(64, 1024)
    double = spec_of(c.NF4WeightOnlyConfig(), w.shape, w.dtype)
    single = spec_of(c.NF4WeightOnlyConfig(double_quant=False), w.shape, w.dtype)
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
    assert spec_of(config, LINEAR, torch.bfloat16) == Spec("f8e5m2", block, scale)


def test_dynamic_formats_describe_their_activations():
    token = (1, WHOLE)
    symmetric = spec_of(c.Int8DynamicActivationInt8WeightConfig(), LINEAR, torch.float32)
    assert symmetric.act == Spec("int8", token)
    config = c.Int8DynamicActivationInt8WeightConfig(symmetric_activations=False)
    assert spec_of(config, LINEAR, torch.float32).act == Spec("uint8", token, zero="int")
    int4 = spec_of(c.Int8DynamicActivationInt4WeightConfig(), LINEAR, torch.float32)
    assert (int4.dtype, int4.block, int4.zero) == ("int4", (1, 32), "none")
    assert int4.act == Spec("uint8", token, zero="int")
    for granularity in ("row", "tensor"):
        config = c.Float8DynamicActivationFloat8WeightConfig(granularity)
        act = spec_of(config, LINEAR, torch.float32).act
        for rows in (1, 5):
            scales = quantize_tensor(torch.randn(rows, 7), act).scale
            assert scales.shape == (1 if granularity == "tensor" else rows, 1)


def test_experts_have_a_scale_for_each_row_or_matrix_of_each_expert():
    shape = (3, 8, 64)
    row = spec_of(c.Int8WeightOnlyConfig(), shape, torch.float32)
    assert quantize_tensor(torch.randn(shape), row).scale.shape == (3, 8, 1)
    group = spec_of(c.Int4WeightOnlyConfig(32), shape, torch.float32)
    assert quantize_tensor(torch.randn(shape), group).scale.shape == (3, 8, 2)
    whole = spec_of(c.Float8WeightOnlyConfig(granularity="tensor"), shape, torch.float32)
    assert quantize_tensor(torch.randn(shape), whole).scale.shape == (3, 1, 1)


def test_filters_keep_8_bits_in_place_and_pack_the_rest_as_one_stream():
    shape = (8, 6, 3, 3)
    int8 = spec_of(c.Int8WeightOnlyConfig(), shape, torch.float32, conv=True)
    assert int8 == Spec("int8", (1, WHOLE, WHOLE, WHOLE))
    tensor = spec_of(
        c.Float8WeightOnlyConfig(granularity="tensor"), shape, torch.float32, conv=True
    )
    assert tensor.block == (WHOLE,) * 4
    for group, extent in [(32, 32), (64, 54), ("row", 54)]:
        spec = spec_of(
            c.Int4WeightOnlyConfig(group, symmetric=True), shape, torch.float32, conv=True
        )
        assert (spec.layout, spec.block) == ("flat", (extent,))
        q = quantize_tensor(torch.randn(shape), spec)
        assert q.stored_bytes == 8 * 54 // 2 + -(-8 * 54 // extent) * 2


def test_a_foreign_configuration_is_refused():
    with pytest.raises(ConfigError, match="no configuration of ao-quant"):
        spec_of(Config(), LINEAR, torch.float32)

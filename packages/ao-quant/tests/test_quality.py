"""Signal to noise and memory of every recipe, from below and above: too good is not quantized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import quantize_

#: recipe -> least and greatest output SQNR in dB of both layers, and of either layer by itself.
#: Default initialisation is uniform, where b bits give about 6 b dB per layer, and two layers 3 less.
BOUNDS = {
    "int8_weight_only": ((44, 52), (47, 55)),
    "int4_weight_only": ((19.5, 25), (22.5, 27)),
    "int4_weight_only/g32-asymmetric": ((20.3, 25), (23.5, 28)),
    "int4_weight_only/g128-symmetric": ((19.5, 25), (22.5, 27)),
    "intx_weight_only": ((32, 38), (35, 41)),
    "intx_weight_only/2bit": ((6, 11), (9, 14)),
    "intx_weight_only/2bit-g64": ((6, 8), (8.5, 11)),
    "intx_weight_only/3bit": ((13, 18), (16, 21)),
    "intx_weight_only/3bit-g64": ((13, 15), (16, 18)),
    "uintx_weight_only": ((19.5, 25), (22.5, 27)),
    "bitnet_weight_only": ((4, 5.5), (7, 9)),
    "bitnet_weight_only/1.6bit": ((4, 5.5), (7, 9)),
    "nf4_weight_only": ((17, 23), (20, 26)),
    "codebook_weight_only": ((19, 24), (22, 27)),
    "fp4_weight_only": ((15.5, 17), (18.5, 20.5)),
    "fp6_llm_weight_only": ((22, 24), (25, 27)),
    "fpx_weight_only": ((22, 24), (25, 27)),
    "float8_weight_only": ((28, 36), (31, 38)),
    "float8_weight_only/tensor": ((28, 36), (31, 38)),
    "float8_weight_only/e5m2": ((22, 29), (25, 32)),
    "float8_weight_only/block": ((28, 36), (31, 38)),
    # powers of two leave up to half of the range unused, more or less of it by luck: the spread
    "mx_weight_only": ((13.5, 16), (15.5, 19.5)),
    "mx_weight_only/mxfp6": ((27, 29.5), (30, 32.5)),
    "mx_weight_only/mxfp8": ((28, 29.5), (30.5, 33.5)),
    "mx_weight_only/mxint8": ((42, 45), (44.5, 49)),
    "nvfp4_weight_only": ((16, 17.5), (19, 20.5)),
    "gguf_weight_only": ((22, 23), (24.5, 26.5)),
    "int8_dynamic_activation_int8_weight": ((36, 44), (38, 47)),
    "int8_dynamic_activation_int8_weight/asymmetric": ((38.5, 46), (41, 49)),
    "float8_dynamic_activation_float8_weight": ((25, 31), (28, 34)),
    "float8_dynamic_activation_float8_weight/tensor": ((25, 31), (28, 34)),
    "int8_dynamic_activation_int4_weight": ((19.5, 25), (22.5, 27)),
    "int8_dynamic_activation_intx_weight": ((31.5, 33.5), (34.5, 36.5)),
    "int8_dynamic_activation_ternary_weight": ((4, 5.5), (7, 9)),
    "float8_dynamic_activation_int4_weight": ((19, 21), (22, 24)),
    "int4_dynamic_activation_int4_weight": ((11, 13), (12.5, 18)),
    "float8_dynamic_activation_float8_weight/block": ((25, 31), (28, 34)),
    "mx_dynamic_activation_mx_weight": ((25, 26.5), (27.5, 30)),
    "mx_dynamic_activation_mx_weight/mxfp4": ((12, 13.5), (14.5, 17)),
    "nvfp4_dynamic_activation_nvfp4_weight": ((13, 15), (16, 18.5)),
}


def _model():
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()


@pytest.mark.parametrize("seed", range(3))
def test_output_sqnr(recipe, seed, sqnr_db):
    torch.manual_seed(seed)
    model, x = _model(), torch.randn(64, 256)
    exact = model(x)
    quantize_(model, recipe)
    low, high = BOUNDS[recipe][0]
    assert low <= sqnr_db(exact, model(x)) <= high


@pytest.mark.parametrize("layer", [0, 2])
def test_output_sqnr_of_one_layer(recipe, layer, sqnr_db):
    model, x = _model(), torch.randn(64, 256)
    exact = model(x)
    quantize_(model[layer], recipe)
    low, high = BOUNDS[recipe][1]
    assert low <= sqnr_db(exact, model(x)) <= high


def test_the_report_agrees_with_the_weights(recipe, sqnr_db):
    model = _model()
    dense = model[0].weight.detach().clone()
    record = next(iter(quantize_(model, recipe)))
    assert record.fqn == "0.weight"
    assert record.sqnr_db == pytest.approx(sqnr_db(dense, model[0].weight.dequantize()), abs=0.01)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("int8_weight_only", 1.0, 1.02),
        ("int4_weight_only", 0.5, 0.53),
        ("int4_weight_only/g128-symmetric", 0.5, 0.52),
        ("int4_weight_only/g32-asymmetric", 0.5, 0.6),
        ("intx_weight_only", 0.75, 0.78),
        ("intx_weight_only/2bit", 0.25, 0.35),
        ("uintx_weight_only", 0.5, 0.55),
        ("bitnet_weight_only", 0.25, 0.251),
        ("bitnet_weight_only/1.6bit", 0.2, 0.204),
        ("nf4_weight_only", 0.5, 0.517),
        ("codebook_weight_only", 0.5, 0.63),
        ("fp4_weight_only", 0.5, 0.532),
        ("fp6_llm_weight_only", 0.75, 0.77),
        ("fpx_weight_only", 0.625, 0.645),
        ("float8_weight_only/block", 1.0, 1.001),
        ("mx_weight_only", 0.53125, 0.53125),
        ("mx_weight_only/mxfp6", 0.78125, 0.78125),
        ("mx_weight_only/mxfp8", 1.03125, 1.03125),
        ("mx_weight_only/mxint8", 1.03125, 1.03125),
        ("nvfp4_weight_only", 0.5625, 0.563),
        ("gguf_weight_only", 0.5625, 0.5625),
        ("float8_weight_only", 1.0, 1.02),
        ("mx_dynamic_activation_mx_weight", 1.03125, 1.03125),
        ("nvfp4_dynamic_activation_nvfp4_weight", 0.5625, 0.563),
        ("int8_dynamic_activation_int8_weight", 1.0, 1.02),
        ("int8_dynamic_activation_int4_weight", 0.5, 0.57),
        ("int8_dynamic_activation_intx_weight", 0.75, 0.82),
        ("float8_dynamic_activation_int4_weight", 0.5, 0.52),
    ],
)
def test_bytes_a_weight(name, low, high):
    model = _model()
    for record in quantize_(model, name).with_status("changed"):
        weights = torch.Size(record.shape).numel()
        owner = model.get_submodule(record.fqn.rpartition(".")[0])
        # in the layout of a kernel there may be a little more: a table, sums of rows
        assert low * weights <= owner.weight.canonical().stored_bytes <= high * weights
        assert owner.weight.stored_bytes == record.bytes_after <= high * weights + 8192


@pytest.mark.parametrize("name", ["int4_weight_only", "int4_weight_only/g128-symmetric"])
@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_bytes_a_weight_of_a_convolution(name, conv):
    layer = conv(64, 32, 3)
    (record,) = quantize_(layer, name).with_status("changed")
    assert 0.5 * layer.weight.numel() <= record.bytes_after <= 0.53 * layer.weight.numel()


def test_nf4_keeps_small_rows_and_survives_blocks_of_zeros(sqnr_db):
    layer = nn.Linear(256, 32)
    with torch.no_grad():
        layer.weight.normal_().mul_(1e-4)
        layer.weight[3] *= 1e-3
        layer.weight[5, :64] = 0
        layer.weight[7] *= 1e-12
        layer.weight[7, 0] = 0
    dense = layer.weight.detach().clone()
    quantize_(layer, "nf4_weight_only")
    values = layer.weight.dequantize()
    assert sqnr_db(dense, values) > 20
    assert sqnr_db(dense[3], values[3]) > 18
    assert torch.equal(values[5, :64], torch.zeros(64))
    assert values[7].abs().max() <= 1e-12

"""Tensors tell what they are; labels may lie, and then it is said."""

from __future__ import annotations

import pytest
import torch

from ao_core import Spec, quantize_tensor
from ao_core.ext import CheckpointError
from ao_quant.interchange.compressed import COMPRESSED
from ao_quant.interchange.gptq import GPTQ, GPTQ_V2
from ao_quant.interchange.hqq import HQQ
from ao_quant.interchange.integers import Integers, tensor_of
from ao_quant.interchange.modelopt import MODELOPT
from ao_quant.interchange.records import INTERCHANGE
from ao_quant.interchange.scales import swizzle
from ao_quant.interchange.words import pack_padded, pack_words, unpack_words

LABEL = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("form", [GPTQ, GPTQ_V2], ids=lambda form: form.name)
def test_the_version_of_gptq_is_that_of_its_zero_points(form, label, integers, source_of) -> None:
    tensor = integers(4, True)
    tensors = form.write("m.weight", tensor, {}).tensors
    source = source_of(tensors, {**LABEL, "checkpoint_format": label})
    assert [each.name for each in INTERCHANGE if each.detect(source)] == [form.name]
    found = form.read(source)
    assert bool(found.notes) == (label != form.name)
    assert all("version" in note for note in found.notes)
    assert torch.equal(found.weights["m.weight"].make().dequantize(), tensor.dequantize())


def test_a_label_of_other_bits_than_the_tensors_does_not_matter(integers, source_of) -> None:
    tensor = integers(8, False)
    source = source_of(
        GPTQ_V2.write("m.weight", tensor, {}).tensors, {**LABEL, "checkpoint_format": "gptq_v2"}
    )
    read = GPTQ_V2.read(source).weights["m.weight"].make()
    assert torch.equal(read.dequantize(torch.float32), tensor.dequantize(torch.float32))


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_padded_words_of_older_files_are_told_by_their_width(bits, integers, source_of) -> None:
    tensor = integers(bits, True, shape=(16, 128))
    tensors = dict(COMPRESSED.write("m.weight", tensor, {}).tensors)
    weights = {"num_bits": bits, "group_size": 32, "type": "int", "symmetric": True}
    label = {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    codes = COMPRESSED.read(source_of(tensors, label)).weights["m.weight"].make()
    unsigned = codes.layout_record.unpack(codes.parts, codes.spec, (16, 128), codes.format)[0] ^ (
        1 << (bits - 1)
    )
    old = tensors | {"m.weight_packed": pack_padded(unsigned, bits)}
    assert old["m.weight_packed"].shape != tensors["m.weight_packed"].shape
    read = COMPRESSED.read(source_of(old, label)).weights["m.weight"].make()
    assert torch.equal(read.dequantize(), tensor.dequantize())


def test_each_format_knows_what_it_wrote_and_no_other_does(integers, source_of) -> None:
    tensor = integers(4, True, 64, (64, 128))
    for form in INTERCHANGE:
        if form.name == "mxfp4":
            continue
        written = form.write("m.weight", tensor, {})
        settings = {"m.weight": written.settings}
        source = source_of(written.tensors, form.config(settings, ()), form.metadata(settings))
        assert [each.name for each in INTERCHANGE if each.detect(source)] == [form.name]


def test_groups_of_columns_of_hqq_are_refused_with_the_reason(integers, source_of) -> None:
    tensors = dict(HQQ.write("m.weight", integers(4, False, 64), {}).tensors)
    tensors["m.axis"] = torch.tensor(0, dtype=torch.int32)
    found = HQQ.read(source_of(tensors))
    assert not found.weights
    assert "axis=0" in found.refused["m.weight"]


NVFP4 = Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed")
MXFP4 = Spec("f4e2m1", (1, 32), "e8m0", layout="packed")
MXFP8 = Spec("f8e4m3", (1, 32), "e8m0")


def _weight(shape, spec):
    """Rows and columns of different sizes, as weights have them."""
    sizes = torch.randn(shape[0], 1).exp() * torch.randn(1, shape[1] // 32).exp().repeat_interleave(
        32, 1
    )
    return quantize_tensor(torch.randn(shape) * sizes * 0.02, spec)


@pytest.mark.parametrize("shape", [(256, 512), (128, 384), (100, 160)], ids=str)
@pytest.mark.parametrize(
    ("form", "spec"),
    [
        (COMPRESSED, NVFP4),
        (COMPRESSED, MXFP4),
        (COMPRESSED, MXFP8),
        (MODELOPT, NVFP4),
        (MODELOPT, MXFP8),
    ],
    ids=["ct-nvfp4", "ct-mxfp4", "ct-mxfp8", "modelopt-nvfp4", "modelopt-mxfp8"],
)
def test_scales_in_the_order_of_tensor_cores_are_put_in_order(form, spec, shape, source_of) -> None:
    tensor = _weight(shape, spec)
    written = form.write("m.weight", tensor, {})
    label = form.config({"m.weight": written.settings}, ())
    right = form.read(source_of(written.tensors, label))
    expected = right.weights["m.weight"].make().dequantize(torch.float32)
    assert not right.notes
    lying = swizzle(written.tensors["m.weight_scale"])
    for stored in (lying, lying.reshape(-1)) if shape == (100, 160) else (lying,):
        found = form.read(source_of({**written.tensors, "m.weight_scale": stored}, label))
        assert "128 × 4" in found.notes[0]
        read = found.weights["m.weight"].make()
        assert torch.equal(read.dequantize(torch.float32), expected)


def test_scales_that_show_no_order_are_in_that_of_the_format(source_of) -> None:
    tensor = quantize_tensor(torch.randn(256, 1024), NVFP4)
    written = MODELOPT.write("m.weight", tensor, {})
    assert not MODELOPT.read(source_of(written.tensors, {"quant_method": "modelopt"})).notes


def test_padded_scales_are_of_some_order(source_of) -> None:
    tensor = _weight((100, 160), NVFP4)
    tensors = dict(MODELOPT.write("m.weight", tensor, {}).tensors)
    plain = torch.zeros(128, 12, dtype=torch.uint8)
    plain[:100, :10] = tensors["m.weight_scale"].view(torch.uint8)
    label = {"quant_method": "modelopt"}
    tensors["m.weight_scale"] = plain.view(torch.float8_e4m3fn)
    found = MODELOPT.read(source_of(tensors, label))
    assert "usual order" in found.notes[0]
    read = found.weights["m.weight"].make()
    assert torch.equal(read.dequantize(torch.float32), tensor.dequantize(torch.float32))
    tensors["m.weight_scale"] = (plain + 1).view(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="no padding of zeros"):
        MODELOPT.read(source_of(tensors, label)).weights["m.weight"].make()


@pytest.mark.parametrize(
    ("form", "name"), [(COMPRESSED, "weight_global_scale"), (MODELOPT, "weight_scale_2")]
)
def test_a_number_for_all_scales_that_is_the_reciprocal(form, name, source_of) -> None:
    tensor = _weight((64, 128), NVFP4)
    written = form.write("m.weight", tensor, {})
    label = form.config({"m.weight": written.settings}, ())
    assert not form.read(source_of(written.tensors, label)).notes
    other = written.tensors[f"m.{name}"].reciprocal()
    found = form.read(source_of({**written.tensors, f"m.{name}": other}, label))
    assert f"m.{name} is the reciprocal" in found.notes[0]
    read = found.weights["m.weight"].make().dequantize(torch.float32)
    assert torch.allclose(read, tensor.dequantize(torch.float32), rtol=2**-22)


def test_zero_points_that_are_no_codes_keep_their_values(integers, source_of) -> None:
    """16 with 4 bits, as version 1 of GPTQ has it, and one below 0 of compressed-tensors."""
    tensor = integers(4, False)
    tensor.zero_point.clamp_(1, 15)
    expected = tensor.dequantize(torch.float32)
    tensors = dict(GPTQ.write("m.weight", tensor, {}).tensors)
    group = slice(32, 64)
    expected[5, group] -= (16 - tensor.zero_point[5, 1].float()) * tensor.scale[5, 1].float()
    zeros = unpack_words(tensors["m.qzeros"], 4, 64)
    zeros[1, 5] = 15
    tensors["m.qzeros"] = pack_words(zeros, 4)
    read = GPTQ.read(source_of(tensors, {**LABEL, "sym": False})).weights["m.weight"].make()
    assert read.spec.dtype == "uint5"
    assert torch.equal(read.dequantize(torch.float32), expected)

    zero = torch.full((64, 4), -3, dtype=torch.int16)
    codes = Integers(torch.randint(0, 16, (64, 128), dtype=torch.uint8), 4, 32, tensor.scale, zero)
    found = tensor_of(codes, torch.float16)
    values = (codes.codes.float() + 3) * codes.scale.float().repeat_interleave(32, 1)
    assert torch.equal(found.dequantize(torch.float32), values)
    with pytest.raises(CheckpointError, match="need 9 bits"):
        tensor_of(codes._replace(zero=codes.zeros + 300), torch.float16)


def test_a_damaged_index_of_groups_is_an_error(integers, source_of) -> None:
    tensors = dict(GPTQ_V2.write("m.weight", integers(4, True), {}).tensors)
    for wrong in (tensors["m.g_idx"] + 100, torch.zeros_like(tensors["m.g_idx"])):
        source = source_of(tensors | {"m.g_idx": wrong}, {**LABEL, "checkpoint_format": "gptq_v2"})
        with pytest.raises(CheckpointError, match="g_idx"):
            GPTQ_V2.read(source).weights["m.weight"].make()

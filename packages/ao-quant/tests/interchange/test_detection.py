"""Tensors tell what they are; labels may lie, and then it is said."""

from __future__ import annotations

import pytest
import torch

from ao_core.ext import CheckpointError
from ao_quant.interchange.compressed import COMPRESSED
from ao_quant.interchange.gptq import GPTQ, GPTQ_V2
from ao_quant.interchange.hqq import HQQ
from ao_quant.interchange.records import INTERCHANGE
from ao_quant.interchange.words import pack_padded

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


def test_a_damaged_index_of_groups_is_an_error(integers, source_of) -> None:
    tensors = dict(GPTQ_V2.write("m.weight", integers(4, True), {}).tensors)
    for wrong in (tensors["m.g_idx"] + 100, torch.zeros_like(tensors["m.g_idx"])):
        source = source_of(tensors | {"m.g_idx": wrong}, {**LABEL, "checkpoint_format": "gptq_v2"})
        with pytest.raises(CheckpointError, match="g_idx"):
            GPTQ_V2.read(source).weights["m.weight"].make()

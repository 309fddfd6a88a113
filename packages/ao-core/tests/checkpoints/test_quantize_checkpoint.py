"""`quantize_checkpoint`: the very bytes of quantizing in memory, and a report on every tensor."""

from __future__ import annotations

import json
import re
from functools import partial
from unittest import TestCase

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ao_core
from ao_core import (
    FqnToConfig,
    Report,
    WeightOnlyConfig,
    load_model,
    open_checkpoint,
    plan_checkpoint,
    quantize_,
    quantize_checkpoint,
    save_model,
    verify_checkpoint,
)
from ao_core.checkpoints.rows import by_rows
from ao_core.errors import ConfigError, QuantizationError

INT4 = WeightOnlyConfig("int4", 32, "bfloat16")
CONFIGS = {
    "int4": INT4,
    "one scale": WeightOnlyConfig("f8e4m3", "tensor"),
    "by name": FqnToConfig(
        {
            "embed_tokens": WeightOnlyConfig("int8"),
            "re:layers\\.1.*": WeightOnlyConfig("uint3", 64, zero_point="int"),
            "layers.2.q_proj": None,
            "*": INT4,
        }
    ),
}


@pytest.mark.parametrize("size", ["5GB", 20_000, 1], ids=["one file", "shards", "a file each"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.usefixtures("small_pieces")
def test_the_bytes_of_quantizing_in_memory(source, tmp_path, in_memory, files, config, size):
    expected = in_memory(config, size)
    report = quantize_checkpoint(source, tmp_path / "out", config, max_shard_size=size)
    found = files(tmp_path / "out")
    assert {name: found.get(name) for name in expected} == expected
    assert sorted(found.keys() - expected.keys()) == [
        "ao_manifest.json", "config.json", "tokenizer.model",
    ]  # fmt: skip
    assert (len(expected) > 4) == (size != "5GB")
    assert report.bytes_after == open_checkpoint(tmp_path / "out").nbytes
    assert not any(file.problem for file in verify_checkpoint(tmp_path / "out"))


def test_every_tensor_has_a_record_with_its_reason(source, tmp_path):
    report = quantize_checkpoint(source, tmp_path / "out", INT4)
    opened = open_checkpoint(source)
    assert {record.fqn for record in report} == opened.entries.keys()
    records = {record.fqn: record for record in report}
    done = {record.fqn for record in report.with_status("changed")}
    assert done == {
        "conv.weight",
        "embed_tokens.weight",  # it is the weight of the head too
        "experts.gate_up_proj",
        *(f"layers.{i}.q_proj.weight" for i in range(12) if i != 3),
    }
    assert records["embed_tokens.weight"].tied == ("lm_head.weight",)
    assert records["layers.3.q_proj.weight"].reason.startswith("it is quantized already (int8")
    assert records["position_ids"].reason == "its dtype is torch.int64"
    assert "a bias or a norm" in records["layers.0.norm.weight"].reason
    head = records["embed_tokens.weight"]
    assert "an output head" in head.reason
    assert head.spec.startswith("int8")
    for record in report:
        assert (record.status == "changed") == (not record.reason) or record is head
        assert record.bytes_before == opened.entries[record.fqn].nbytes
    assert all(5 < r.sqnr_db < 40 for r in report.with_status("changed") if r is not head)
    # in natural order
    names = [r.fqn for r in report]
    assert names.index("layers.10.q_proj.weight") == names.index("layers.9.q_proj.weight") + 4
    written = Report.from_json((tmp_path / "out" / "ao_report.json").read_text())
    assert written == report
    assert "layers.11.q_proj.weight" in (tmp_path / "out" / "ao_report.html").read_text()


@pytest.mark.parametrize("config", [INT4, CONFIGS["one scale"]], ids=["int4", "one scale"])
def test_large_weights_are_quantized_some_rows_at_a_time(tmp_path, files, monkeypatch, config):
    """The bytes do not show it."""
    few = partial(
        by_rows, elements=1
    )  # 128 rows: a weight as large as memory, seen from a distance
    monkeypatch.setattr("ao_core.checkpoints.convert.by_rows", few)
    model = nn.Sequential(nn.Linear(72, 300).bfloat16())
    save_model(model, tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", config)
    quantize_(model, config)
    save_model(model, tmp_path / "in_memory")
    expected = files(tmp_path / "in_memory")
    assert files(tmp_path / "out").items() >= expected.items()


def test_the_result_loads_into_the_model(source, tmp_path, build):
    quantize_checkpoint(source, tmp_path / "out", INT4)
    model = build()
    load_model(model, tmp_path / "out")
    assert model.lm_head.weight is model.embed_tokens.weight
    dense = build()
    for i in (0, 11):
        new, old = model.layers[i].q_proj.weight, dense.layers[i].q_proj.weight.float()
        error = (new.dequantize().float() - old).norm() / old.norm()
        assert 0.02 < error < 0.2


def test_what_other_programs_publish(published, tmp_path):
    torch.manual_seed(0)
    tensors = {f"h.{i}.attn.weight": torch.randn(33, 70).half() for i in range(11)}
    tensors |= {"wte.weight": torch.randn(60, 70).half(), "h.0.ln_1.weight": torch.ones(70)}
    tensors |= {"h.0.mlp.weight_scale": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    names = sorted(tensors)
    source = published([{n: tensors[n] for n in names[i::3]} for i in range(3)])
    report = quantize_checkpoint(source, tmp_path / "out", INT4, max_shard_size=9000)
    assert len(report.with_status("changed")) == 11
    assert [r.reason for r in report if r.fqn == "h.0.mlp.weight_scale"] == [
        "its dtype is torch.float8_e4m3fn"
    ]
    opened = open_checkpoint(tmp_path / "out")
    for name in set(names) - {r.fqn for r in report.with_status("changed")}:
        assert torch.equal(opened.load(name).float(), tensors[name].float())
    for record in report.with_status("changed"):
        new = opened.load(record.fqn)
        expected = ao_core.quantize_tensor(tensors[record.fqn], new.canonical().spec)
        for (_, a), (_, b) in zip(new.canonical().leaves(), expected.leaves(), strict=True):
            assert torch.equal(a, b)


def test_other_files(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", INT4)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"tokens"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    plan = plan_checkpoint(source, INT4)
    assert plan.files == ("config.json", "tokenizer.model")
    assert plan.left_out == {
        "original": "it is a directory",
        "pytorch_model.bin": "it holds weights in another format",
    }


def test_patterns(source, tmp_path):
    report = quantize_checkpoint(
        source, tmp_path / "a", INT4, include=["embed", r"norm\.weight$", r"\.1\.q_proj"]
    )
    done = {r.fqn for r in report.with_status("changed")}
    assert done == {"embed_tokens.weight", "layers.1.q_proj.weight"}
    reasons = {r.fqn: r.reason for r in report}
    assert reasons["layers.2.q_proj.weight"] == "no pattern of include matches it"
    assert "a bias or a norm" in reasons["layers.1.norm.weight"]
    report = quantize_checkpoint(source, tmp_path / "b", INT4, exclude=["layers", "conv"])
    assert {r.fqn for r in report.with_status("changed")} == {
        "embed_tokens.weight",
        "experts.gate_up_proj",
    }
    for option in ("include", "exclude"):
        with pytest.raises(ConfigError, match=f"{option}='nothing': matches no tensor"):
            quantize_checkpoint(source, tmp_path / "c", INT4, **{option: ["nothing"]})
        with pytest.raises(ConfigError, match=rf"{option}='\(': no valid regular expression"):
            quantize_checkpoint(source, tmp_path / "c", INT4, **{option: ["("]})
    assert not (tmp_path / "c").exists()


def test_the_plan_is_what_happens(source, tmp_path):
    plan = plan_checkpoint(source, INT4)
    report = quantize_checkpoint(source, tmp_path / "out", INT4)
    keys = ("fqn", "status", "reason", "shape", "bytes_before", "bytes_after", "spec", "tied")
    for planned, done in zip(plan.report, report, strict=True):
        assert all(getattr(planned, key) == getattr(done, key) for key in keys)
    largest = max(record.bytes_before for record in report)
    assert plan.peak_memory == 2 * largest + 256 * 10**6
    text = str(plan)
    assert re.search(r"embed_tokens.weight = lm_head.weight +50×72 +bfloat16 +7.2 kB", text)
    assert f"14 of {len(report.records)} tensors to quantize" in text
    assert f"memory: at most {plan.peak_memory / 1e6:.1f} MB beside" in text
    assert "experts.gate_up_proj, 17.3 kB" in text
    assert "left out: pytorch_model.bin: it holds weights in another format" in text


def test_memory_is_stated_before_the_work(source, tmp_path):
    with TestCase().assertLogs("ao_core", "INFO") as logged:
        quantize_checkpoint(source, tmp_path / "out", INT4)
    assert plan_checkpoint(source, INT4).memory in logged.output[0]


@pytest.mark.usefixtures("small_pieces")
def test_progress_counts_bytes(source, tmp_path, capsys):
    calls = []
    quantize_checkpoint(source, tmp_path / "a", INT4, progress=lambda *call: calls.append(call))
    total = sum(entry.nbytes for entry in open_checkpoint(source).entries.values())
    assert {call[1] for call in calls} == {total}
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert (done[0], calls[-1]) == (0, (total, total, ""))
    assert "experts.gate_up_proj" in {name for _, _, name in calls}
    capsys.readouterr()
    quantize_checkpoint(source, tmp_path / "b", INT4, progress=True)
    bar = capsys.readouterr().err
    assert "quantize: 100%" in bar
    assert "write: 100%" in bar
    assert "B/s" in bar  # and the time that is left before it


def test_a_name_that_would_be_used_twice(tmp_path):
    tensors = {"a.weight": torch.randn(8, 32), "a.weight.scale": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="two tensors would be stored as 'a.weight.scale'"):
        quantize_checkpoint(tmp_path / "model.safetensors", tmp_path / "out", INT4)
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite(source, tmp_path, published):
    tensors = [{"a.weight": torch.ones(8, 32)}, {"b.weight": torch.full((8, 32), torch.nan)}]
    bad = published(tensors, "bad")
    with pytest.raises(QuantizationError, match=r"b\.weight has 256 NaN"):
        quantize_checkpoint(bad, tmp_path / "out", INT4)
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(source, tmp_path / "out", INT4)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(QuantizationError, match="NaN"):
        quantize_checkpoint(bad, tmp_path / "out", INT4, overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    report = quantize_checkpoint(bad, tmp_path / "out", INT4, overwrite=True, exclude=["b"])
    assert report.coverage == 50
    assert json.loads((tmp_path / "out" / "ao_manifest.json").read_text())["files"].keys() == {
        "ao.lock.json", "model.safetensors",
    }  # fmt: skip
    assert open_checkpoint(tmp_path / "out").entries.keys() == {"a.weight", "b.weight"}

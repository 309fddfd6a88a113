"""`ao quantize`: what is quantized, what is kept, and what is left behind by an error."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import FqnToConfig, QTensor, Report, config_to_json, load_model, quantize_, save_model
from ao_core.tensor.saving import open_checkpoint

USUAL = {
    "layers.0.attn.q_proj.weight",
    "layers.0.mlp.experts.gate_up_proj",
    "conv1.weight",
    "lm_head.weight",
}


def quantized(path):
    return {e.fqn for e in open_checkpoint(path).entries.values() if e.spec is not None}


def files(path):
    return sorted(file.name for file in path.iterdir())


def test_usual_weights_are_quantized_and_all_else_kept(ao, source, tensors, tmp_path):
    result = ao("quantize", source, tmp_path / "out", "--config", "small4")
    assert result.exit_code == 0, result.stderr
    opened = open_checkpoint(tmp_path / "out")
    assert quantized(tmp_path / "out") == USUAL
    assert set(opened.entries) == set(tensors)
    for name in set(tensors) - USUAL:
        assert torch.equal(opened.load(name), tensors[name])
        assert opened.load(name).dtype == tensors[name].dtype
    for name in USUAL:
        made = opened.load(name)
        error = (made.dequantize().float() - tensors[name].float()).norm()
        # 4 bits with a scale for 32 elements: 15 to 28 dB
        assert 10 ** (-28 / 20) < error / tensors[name].float().norm() < 10 ** (-15 / 20)
        assert made.dtype == tensors[name].dtype


def test_the_result_says_what_was_done_and_why_not(ao, source, tmp_path):
    text = ao("quantize", source, tmp_path / "out", "--config", "small4").stdout
    assert "layers.0.odd.weight: Linear of odd width 7" in text
    assert "1 × embeddings are kept" in text
    assert "1 × its name ends in 'rotary', not in weight or _proj" in text
    assert "1 × its dtype is torch.int64" in text
    assert "4 of 10 parameters changed" in text
    # a package that knows such folders may add how it is loaded
    assert f"written to {tmp_path / 'out'}\n" in text


def test_side_files_are_copied_but_no_other_weights(ao, source, tmp_path):
    ao("quantize", source, tmp_path / "out", "--config", "small4")
    assert files(tmp_path / "out") == [
        "ao.lock.json", "ao_manifest.json", "ao_report.html", "ao_report.json",
        "config.json", "model.safetensors", "tokenizer.model",
    ]  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"tokens"


def test_same_bits_as_quantize_on_the_model(ao, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8, bias=False))
    save_model(model, tmp_path / "dense")
    ao(
        "quantize",
        tmp_path / "dense",
        tmp_path / "out",
        "--config",
        "small4",
        "--set",
        "group_size=16",
    )
    quantize_(model, "small4/row")  # another format: loading replaces it
    load_model(model, tmp_path / "out")
    expected = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8, bias=False))
    load_model(expected, tmp_path / "dense")
    report = quantize_(expected, FqnToConfig({"*": load("small4", "group_size=16")}))
    assert len(report.with_status("changed")) == 2
    x = torch.randn(3, 64)
    assert torch.equal(model(x), expected(x))


def load(name, *settings):
    from ao_core.cli.settings import load_config

    return load_config(name, list(settings))


def test_include_and_exclude(ao, source, tmp_path):
    args = ("--include", "embed", "--include", r"q_proj\.weight$", "--include", "rotary")
    result = ao("quantize", source, tmp_path / "a", "--config", "small4", *args)
    assert result.exit_code == 0, result.stderr
    assert quantized(tmp_path / "a") == {
        "embed_tokens.weight",
        "layers.0.attn.q_proj.weight",
        "layers.0.rotary",
    }
    assert "no pattern of include matches it" in result.stdout
    args = ("--exclude", "lm_head|conv", "--exclude", "experts")
    result = ao("quantize", source, tmp_path / "b", "--config", "small4", *args)
    assert quantized(tmp_path / "b") == {"layers.0.attn.q_proj.weight"}
    assert "3 × a pattern of exclude leaves it out" in result.stdout


def test_a_configuration_for_each_name(ao, source, tmp_path):
    rules = FqnToConfig({"lm_head": None, "re:embed.*": "small4/row", "*": "small4"})
    (tmp_path / "rules.json").write_text(config_to_json(rules))
    result = ao("quantize", source, tmp_path / "out", "--config", tmp_path / "rules.json")
    assert result.exit_code == 0, result.stderr
    opened = open_checkpoint(tmp_path / "out")
    assert opened.entries["lm_head.weight"].spec is None
    assert opened.entries["embed_tokens.weight"].spec.block == (1, -1)
    assert opened.entries["conv1.weight"].spec.block == (1, 32)


def test_shards_of_an_index_and_of_the_result(ao, tensors, tmp_path):
    source = tmp_path / "sharded"
    source.mkdir()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2],
             "model-00002-of-00002.safetensors": names[1::2]}  # fmt: skip
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, source / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    args = ("--config", "small4", "--max-shard-size", "8KB")
    result = ao("quantize", source, tmp_path / "out", *args)
    assert result.exit_code == 0, result.stderr
    assert quantized(tmp_path / "out") == USUAL
    assert len(open_checkpoint(tmp_path / "out").files) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        file.name for file in (tmp_path / "out").glob("*.safetensors")
    }


def test_one_file_as_the_source(ao, source, tmp_path):
    result = ao("quantize", source / "model.safetensors", tmp_path / "out", "--config", "small4")
    assert result.exit_code == 0, result.stderr
    written = [
        "ao.lock.json", "ao_manifest.json", "ao_report.html", "ao_report.json", "model.safetensors",
    ]  # fmt: skip
    assert files(tmp_path / "out") == written
    assert quantized(tmp_path / "out") == USUAL


def test_ties_are_kept_and_quantized_twice_is_harmless(ao, tmp_path):
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(20, 64), "head": nn.Linear(64, 20)})
    model["head"].weight = model["embed_tokens"].weight
    save_model(model, tmp_path / "dense")
    first = ao("quantize", tmp_path / "dense", tmp_path / "a", "--config", "small4")
    assert "embed_tokens.weight = head.weight" in first.stdout
    second = ao("quantize", tmp_path / "a", tmp_path / "b", "--config", "small4/row")
    assert second.exit_code == 0, second.stderr
    assert "it is quantized already (int4[1×32]" in second.stdout
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert a.ties == b.ties
    assert len(a.ties) == 1
    for name in set(a.entries) - {"head.bias"}:
        x, y = a.load(name), b.load(name)
        assert isinstance(x, QTensor)
        for (_, p), (_, q) in zip(x.leaves(), y.leaves(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("suffix", ["html", "json"])
def test_report_file(ao, source, tmp_path, suffix):
    path = tmp_path / f"report.{suffix}"
    result = ao("quantize", source, tmp_path / "out", "--config", "small4", "--report", path)
    assert result.exit_code == 0, result.stderr
    text = path.read_text("utf-8")
    if suffix == "json":
        report = Report.from_json(text)
        assert {r.fqn for r in report.with_status("changed")} == USUAL
        assert report.bytes_after == open_checkpoint(tmp_path / "out").nbytes
        assert report.config["name"] == "small4"
    else:
        assert "<h1>source as small4</h1>" in text
        assert text.count("<tr") == 11


def test_plan_writes_nothing(ao, source, tmp_path):
    args = ("quantize", source, tmp_path / "out", "--config", "small4")
    result = ao(*args, "--plan")
    assert result.exit_code == 0, result.stderr
    assert not (tmp_path / "out").exists()
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert "int4[1×32]" in rows["lm_head.weight"]
    assert "unchanged: embeddings are kept" in rows["embed_tokens.weight"]
    assert "skipped: Linear of odd width 7" in rows["layers.0.odd.weight"]
    assert "4 of 10 tensors to quantize" in result.stdout
    assert "copied too: config.json, tokenizer.model" in result.stdout
    assert "left out: pytorch_model.bin" in result.stdout
    memory = rows["memory:"]
    assert "twice the largest tensor (layers.0.mlp.experts.gate_up_proj, 24.6" in memory
    assert memory in ao(*args).stderr  # stated before the work, too


def test_a_run_that_was_killed_goes_on(ao, source, tmp_path, monkeypatch):
    import os

    real = os.replace

    def stop(old, new):
        if str(new).endswith(".safetensors"):
            raise OSError(28, os.strerror(28))
        real(old, new)

    args = ("quantize", source, tmp_path / "out", "--config", "small4")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        result = ao(*args)
    assert result.exit_code == 2
    assert "No space left on device. What is done is kept in" in result.stderr
    refused = ao("verify", tmp_path / "out")
    assert (refused.exit_code, "an unfinished run" in refused.stderr) == (2, True)
    other = ao(*args[:-1], "small4/row")
    assert (other.exit_code, "unfinished run with another config" in other.stderr) == (2, True)
    assert ao(*args).exit_code == 0
    assert quantized(tmp_path / "out") == USUAL


def test_verify(ao, source, tmp_path):
    ao("quantize", source, tmp_path / "out", "--config", "small4")
    result = ao("verify", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "4 of 4 files are as they were written" in result.stdout
    (tmp_path / "out" / "config.json").write_text("{}")
    result = ao("verify", tmp_path / "out")
    assert result.exit_code == 1
    assert "it has 2 bytes, and had" in result.stdout
    assert "3 of 4 files are" in result.stdout
    result = ao("verify", tmp_path / "out", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert not data["ok"]
    assert [f["name"] for f in data["files"] if f["problem"]] == ["config.json"]
    assert ao("verify", source).exit_code == 2  # of others: nothing to compare with


def test_not_finite_weight_leaves_nothing(ao, tensors, tmp_path):
    tensors["lm_head.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "bad.safetensors")
    result = ao("quantize", tmp_path / "bad.safetensors", tmp_path / "out", "--config", "small4")
    assert result.exit_code == 2
    assert "lm_head.weight has 1 NaN or inf" in result.stderr
    assert not (tmp_path / "out").exists() or files(tmp_path / "out") == []


def test_a_failing_run_keeps_the_checkpoint_that_was_there(ao, source, tensors, tmp_path):
    ao("quantize", source, tmp_path / "out", "--config", "small4")
    before = {file: (tmp_path / "out" / file).read_bytes() for file in files(tmp_path / "out")}
    tensors["lm_head.weight"][0] = float("inf")
    save_file(tensors, tmp_path / "bad.safetensors")
    args = ("quantize", tmp_path / "bad.safetensors", tmp_path / "out", "--config", "small4/row")
    refused = ao(*args)
    assert (refused.exit_code, "is not empty" in refused.stderr) == (2, True)
    failed = ao(*args, "--overwrite")
    assert (failed.exit_code, "NaN or inf" in failed.stderr) == (2, True)
    assert {
        file: (tmp_path / "out" / file).read_bytes() for file in files(tmp_path / "out")
    } == before
    replaced = ao("quantize", source, tmp_path / "out", "--config", "small4/row", "--overwrite")
    assert replaced.exit_code == 0, replaced.stderr
    assert open_checkpoint(tmp_path / "out").entries["lm_head.weight"].spec.block == (1, -1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--config", "smal4"), "Did you mean 'small4'"),
        (("--config", "small4", "--set", "group_size=5"), "use 16, 32 or 'row'"),
        (("--config", "small4", "--include", "nothing"), "include='nothing': matches no tensor"),
        (("--config", "small4", "--exclude", "("), "exclude='(': no valid regular expression"),
        (("--config", "small4", "--report", "out.txt"), "must end in .html or .json"),
        (("--config", "small4", "--report", "no/such/r.json"), "there is no directory"),
        (("--config", "small4", "--max-shard-size", "big"), "max_shard_size='big'"),
        (("--config", "rowwise_training"), "there is nothing to write"),
    ],
)
@pytest.mark.usefixtures("rowwise_training")
def test_bad_arguments(ao, source, tmp_path, args, message):
    result = ao("quantize", source, tmp_path / "out", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists() or files(tmp_path / "out") == []


def test_bad_paths(ao, source, tmp_path):
    absent = ao("quantize", tmp_path / "absent", tmp_path / "out", "--config", "small4")
    assert "there is no such directory or file" in absent.stderr
    onto = ao("quantize", source, source, "--config", "small4", "--overwrite")
    assert "is where SRC is" in onto.stderr
    beside = ao("quantize", source / "model.safetensors", source, "--config", "small4")
    assert "is where SRC is" in beside.stderr
    file = ao("quantize", source, source / "config.json", "--config", "small4")
    assert "is a file" in file.stderr
    (source / "model.safetensors").unlink()
    pickle = ao("quantize", source, tmp_path / "out", "--config", "small4")
    assert "pickle" in pickle.stderr
    assert {r.exit_code for r in (absent, onto, beside, file, pickle)} == {2}

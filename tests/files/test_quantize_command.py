"""`ao quantize` on folders as they are on the Hub: what cannot work says why, and SRC stays as it is."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from typer.testing import CliRunner

from ao_core.checkpoints import folders
from ao_core.cli.app import make_app

INT8 = ("--config", "int8_weight_only")
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.fixture
def ao():
    runner, app = CliRunner(), make_app()
    return lambda *args: runner.invoke(app, [str(arg) for arg in args])


@pytest.fixture
def source(tmp_path):
    """A folder in two shards, with a tokenizer and a card."""
    folder = tmp_path / "source"
    folder.mkdir()
    names = ("model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    for file, name in zip(SHARDS, names, strict=True):
        save_file({name: torch.randn(16, 32)}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict(zip(names, SHARDS, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# Small\n")
    return folder


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_whole(ao, source, tmp_path):
    before = contents(source)
    done = ao("quantize", source, tmp_path / "q", *INT8)
    assert done.exit_code == 0, done.stderr
    assert contents(source) == before
    line = f"transformers.LlamaForCausalLM.from_pretrained({str(tmp_path / 'q')!r})"
    assert (
        done.stdout.splitlines()[-1] == f"load it with: import ao_hf, transformers; model = {line}"
    )
    assert sorted(file.name for file in (tmp_path / "q").iterdir()) == [
        "README.md", "ao.lock.json", "ao_manifest.json", "ao_report.html", "ao_report.json",
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert ao("verify", tmp_path / "q").exit_code == 0
    again = ao("quantize", tmp_path / "q", tmp_path / "again", *INT8)
    assert again.stdout.count("it is quantized already (int8") == 1
    assert "0 of 2 parameters changed" in again.stdout


def unfinished(source):
    (source / SHARDS[1]).unlink()


def truncated(source):
    data = (source / SHARDS[1]).read_bytes()
    (source / SHARDS[1]).write_bytes(data[:-9])


def pickles(source):
    for file in source.glob("model*"):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"pickle")


def of_awq(source):
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (source / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "target", "config", "message"),
    [
        (None, "q", "int8_weight_onli", "Did you mean 'int8_weight_only'"),
        (unfinished, "q", "int8_weight_only", f"lists {SHARDS[1]}, which is missing"),
        (truncated, "q", "int8_weight_only", f"{SHARDS[1]}: truncated"),
        (pickles, "q", "int8_weight_only", "pytorch_model.bin is a pickle"),
        (of_awq, "q", "int8_weight_only", "by 'awq' already, which transformers with gptqmodel"),
        (None, "source", "int8_weight_only", "is where SRC is"),
        (None, "source/q", "int8_weight_only", "is inside SRC"),
        (None, "full", "int8_weight_only", "is not empty (it has notes.txt)"),
    ],
)  # fmt: skip
def test_what_cannot_work(ao, source, tmp_path, change, target, config, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    if change is not None:
        change(source)
    before = contents(tmp_path)
    done = ao("quantize", source, tmp_path / target, "--config", config)
    assert done.exit_code == 2
    assert message in done.stderr
    assert contents(tmp_path) == before
    assert not (tmp_path / "q").exists()


def test_no_space_for_the_last_files(ao, source, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = contents(source)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_whole", full)
        done = ao("quantize", source, tmp_path / "q", *INT8)
    assert done.exit_code == 2
    assert "No space left on device. What is done is kept in" in done.stderr
    assert "run the same command again to go on" in done.stderr
    assert ao("verify", tmp_path / "q").exit_code == 2
    assert ao("quantize", source, tmp_path / "q", *INT8).exit_code == 0
    ao("quantize", source, tmp_path / "other", *INT8)
    first, other = contents(tmp_path / "q"), contents(tmp_path / "other")
    assert {p for p in first if first[p] != other.get(p)} <= {
        p for p in first if "report" in p.name
    }
    assert contents(source) == before


def test_a_name_of_the_hub(ao, source, tmp_path, monkeypatch):
    home = tmp_path / "hub" / "models--me--small"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    shutil.copytree(source, home / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    done = ao("quantize", "me/small", "q", *INT8)
    assert done.exit_code == 0, done.stderr
    assert "base_model: me/small\n" in (tmp_path / "q" / "README.md").read_text()
    assert "lm_head.weight" in ao("inspect", "me/small").stdout
    assert "there is no ao_manifest.json" in ao("verify", "me/small").stderr
    nothing = ao("quantize", "me/other", "o", *INT8)
    assert (nothing.exit_code, nothing.stderr.count("\n")) == (2, 1)
    assert "there is no such directory or file, and the Hub cannot be reached" in nothing.stderr
    # a folder of that name comes first
    (tmp_path / "me" / "small").mkdir(parents=True)
    assert "no safetensors file is here" in ao("quantize", "me/small", "o", *INT8).stderr

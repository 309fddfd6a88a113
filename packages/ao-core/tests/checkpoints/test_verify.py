"""`verify_checkpoint`: every changed bit, missing file and stranger is found."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import WeightOnlyConfig, quantize_checkpoint, save_model, verify_checkpoint
from ao_core.errors import CheckpointError


@pytest.fixture
def done(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"), max_shard_size=40_000)
    return tmp_path / "out"


def problems(path):
    return {file.name: file.problem for file in verify_checkpoint(path) if file.problem}


def test_every_file_is_listed(done, files):
    found = verify_checkpoint(done)
    assert {file.name for file in found} == files(done).keys() - {"ao_manifest.json"}
    assert {file.by for file in found} == {"sha256"}
    assert not problems(done)
    assert {f.name: f.nbytes for f in found} == {
        f.name: (done / f.name).stat().st_size for f in found
    }


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]
)
def test_damage(done, name):
    path = done / name
    whole = path.read_bytes()
    for position in (0, len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        assert problems(done).keys() == {name}
        assert "its SHA-256 is" in problems(done)[name]
    path.write_bytes(whole[:-1])
    assert problems(done) == {name: f"it has {len(whole) - 1} bytes, and had {len(whole)}"}
    path.unlink()
    assert problems(done) == {name: "it is missing"}
    path.write_bytes(whole)
    assert not problems(done)


def test_a_stranger(done):
    save_file({"x": torch.ones(2)}, done / "model-00009-of-00009.safetensors")
    assert problems(done) == {
        "model-00009-of-00009.safetensors": "it is not listed in ao_manifest.json"
    }


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": 3}}'])
def test_a_manifest_that_is_none(done, text):
    (done / "ao_manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"ao_manifest\.json: cannot be read"):
        verify_checkpoint(done)


def test_the_manifest_says_what_was_done(done, source):
    manifest = json.loads((done / "ao_manifest.json").read_text())
    assert manifest["config"]["args"]["dtype"] == "int8"
    assert manifest["source"] == {f.name: f.stat().st_size for f in source.glob("*.safetensors")}


def test_checksums_of_save_model(tmp_path):
    save_model(nn.Linear(30, 20), tmp_path / "a")
    (file,) = verify_checkpoint(tmp_path / "a")
    assert (file.name, file.by, file.problem) == ("model.safetensors", "crc32", "")
    path = tmp_path / "a" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "corrupted, the checksum of" in problems(tmp_path / "a")["model.safetensors"]


def test_nothing_to_compare_with(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'x' has no checksum, and there is no ao_manifest"):
        verify_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        verify_checkpoint(tmp_path / "absent")

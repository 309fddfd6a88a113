"""`verify_checkpoint`: every changed bit, missing file and stranger is found."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import (
    WeightOnlyConfig,
    plan_checkpoint,
    quantize_checkpoint,
    save_model,
    verify_checkpoint,
)
from ao_core.checkpoints import verify
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


class TestHostileManifests:
    @pytest.mark.parametrize(
        "name",
        ["/dev/zero", "../source/config.json", "..", "a/b", "", "a\x00b", "\ud800"],
        ids=repr,
    )
    def test_names_outside_the_folder(self, done, name, monkeypatch):
        monkeypatch.setattr(verify, "hash_of", lambda path: pytest.fail(f"reads {path}"))
        manifest = {"files": {name: {"bytes": 0, "sha256": "0" * 64}}}
        (done / "ao_manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(
            CheckpointError, match=r"ao_manifest\.json: cannot be read: .*manifest\.files"
        ):
            verify_checkpoint(done)

    @pytest.mark.parametrize(
        "info",
        [3, [], {}, {"bytes": "1", "sha256": "0" * 64}, {"bytes": 1.5, "sha256": "0" * 64}, {"bytes": -1},
         {"bytes": 1, "sha256": "0"}, {"bytes": 2**80, "sha256": "0" * 64}, {"bytes": 1, "sha256": None}],
        ids=str,
    )  # fmt: skip
    def test_what_it_says_of_a_file(self, done, info):
        (done / "ao_manifest.json").write_text(json.dumps({"files": {"config.json": info}}))
        with pytest.raises(CheckpointError, match=r"manifest\.files\['config\.json'\]"):
            verify_checkpoint(done)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="kinds of files of POSIX")
    @pytest.mark.parametrize("kind", ["pipe", "device", "directory", "outside"])
    @pytest.mark.parametrize(
        "name", ["config.json", "ao_manifest.json", "model-00001-of-00003.safetensors"]
    )
    def test_special_files(self, done, tmp_path, kind, name):
        path, whole = done / name, (done / name).read_bytes()
        path.unlink()
        (tmp_path / "outside").write_bytes(whole)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to({"device": "/dev/zero", "outside": tmp_path / "outside"}[kind])
        if name == "ao_manifest.json":
            if kind == "outside":
                assert not problems(done)  # what it says is checked as that of any other
                return
            with pytest.raises(CheckpointError, match=f"ao_manifest.json: is a {kind}"):
                verify_checkpoint(done)
        else:
            assert problems(done).keys() == {name}
            assert {"outside": "link to a file outside"}.get(kind, kind) in problems(done)[name]

    def test_the_cache_of_hugging_face(self, done, tmp_path):
        """Its folders hold links to the blobs of the repository, which are no strangers."""
        home = tmp_path / "models--a--b"
        (home / "blobs").mkdir(parents=True)
        (home / "snapshots" / "abc").mkdir(parents=True)
        for file in done.iterdir():
            file.rename(home / "blobs" / file.name)
            (home / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{file.name}")
        snapshot = home / "snapshots" / "abc"
        assert not problems(snapshot)
        quantize_checkpoint(snapshot, tmp_path / "again", WeightOnlyConfig("int8"))
        again = tmp_path / "again" / "tokenizer.model"
        assert again.read_bytes() == (snapshot / "tokenizer.model").read_bytes()


def test_links_out_of_the_source_are_not_copied(source, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (source / "config.json").unlink()
    (source / "config.json").symlink_to(tmp_path / "secret")
    os.mkfifo(source / "pipe")
    (source / "inside.json").symlink_to("tokenizer.model")
    plan = plan_checkpoint(source, WeightOnlyConfig("int8"))
    assert plan.left_out["config.json"] == "it is a link to a file outside the folder"
    assert plan.left_out["pipe"] == "it is a pipe, and no file"
    assert plan.left_out["original"] == "it is a directory"
    quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert (tmp_path / "out" / "inside.json").read_bytes() == b"tokens"
    assert not (tmp_path / "out" / "config.json").exists()
    assert not any(file.problem for file in verify_checkpoint(tmp_path / "out"))

"""Names of the Hub as sources: from the cache, from a stub of the Hub, and what cannot be brought."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from huggingface_hub.hf_api import RepoFile
from safetensors.torch import save_file

from ao_core import open_checkpoint
from ao_core.ext import CheckpointError
from ao_hf.folders import TRANSFORMERS
from ao_hf.hub import fetch, model_of
from ao_quant import quantize_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "home" / "hub"


@pytest.fixture
def published(tmp_path):
    """The files of a model, as they are on the Hub."""
    folder = tmp_path / "published"
    folder.mkdir()
    save_file({"proj.weight": torch.randn(8, 16)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: me/first\n---\n# Small\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


@pytest.fixture
def cached(cache, published):
    """The model in the cache, as huggingface_hub keeps it: links to blobs, and the name of a commit."""
    home = cache / "models--me--small"
    snapshot = home / "snapshots" / COMMIT
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for file in published.iterdir():
        shutil.copy(file, home / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    return snapshot


@pytest.fixture
def online(monkeypatch, published, cache):
    """A Hub that has one model; the list returned has the files that were downloaded."""
    downloaded = []

    def repo_info(self, repo_id, **options):
        if repo_id != "me/small":
            kind = errors.GatedRepoError if "gated" in repo_id else errors.RepositoryNotFoundError
            request = httpx2.Request("GET", f"https://huggingface.co/{repo_id}")
            raise kind("404", response=httpx2.Response(404, request=request))
        return SimpleNamespace(sha=COMMIT)

    def list_repo_tree(self, repo_id, **options):
        for file in published.iterdir():
            yield RepoFile(path=file.name, size=file.stat().st_size, oid=file.name)
        yield RepoFile(path="onnx/model.safetensors", size=1, oid="x")

    def download(repo_id, *, filename, revision, cache_dir, **options):
        downloaded.append(filename)
        target = cache / "models--me--small" / "snapshots" / revision / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(published / filename, target)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", list_repo_tree)
    monkeypatch.setattr("huggingface_hub._snapshot_download.hf_hub_download", download)
    return downloaded


def test_from_the_cache_without_a_network(cached, tmp_path):
    assert fetch("me/small") == fetch(f"me/small@{COMMIT}") == cached
    before = {file.name: os.readlink(file) for file in cached.iterdir()}
    report = quantize_checkpoint(cached, tmp_path / "q", "int8_weight_only")
    assert len(report.with_status("changed")) == 1
    assert {file.name: os.readlink(file) for file in cached.iterdir()} == before
    card = (tmp_path / "q" / "README.md").read_text()
    assert "base_model: me/small\n" in card
    assert "base_model_relation: quantized\n" in card
    assert "license: mit\n" in card
    assert "# Small\n\n<!-- ao" in card
    assert open_checkpoint(tmp_path / "q").entries["proj.weight"].spec is not None


def test_weights_and_texts_are_downloaded_and_no_pickles(online, cache):
    folder = fetch("me/small")
    assert folder == cache / "models--me--small" / "snapshots" / COMMIT
    assert sorted(online) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/other", "no such directory or file, and the Hub has no such model, or it is private"),
        ("me/gated", r"those who asked for it: ask on https://huggingface.co/me/gated"),
        ("me/sm--all", "it is no name of a model of the Hub"),
    ],
)
def test_what_the_hub_does_not_give(online, name, message):
    with pytest.raises(CheckpointError, match=message):
        fetch(name)
    assert not online


def test_only_pickles(online, published):
    (published / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"as pickles only \(pytorch_model.bin\)"):
        fetch("me/small")
    assert "pytorch_model.bin" not in online


def test_no_network_and_nothing_or_a_part_in_the_cache(cached, cache):
    with pytest.raises(
        CheckpointError, match=r"cannot be reached \(HF_HUB_OFFLINE=1\), and its cache in"
    ):
        fetch("me/other")
    (cached / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="as pickles only"):
        fetch("me/small")
    (cached / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors files at its top"):
        fetch("me/small")


@pytest.mark.parametrize(
    "name", ["small", "/me/small", "../me/small", "../small", "a/b/c", "me/small@", "a b/c"]
)
def test_what_is_no_name_of_the_hub(name):
    assert fetch(name) is None


def test_whose_model_it_is(cached, tmp_path, monkeypatch):
    assert model_of(cached) == "me/small"
    assert model_of("me/small") == "me/small"
    (tmp_path / "me" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_of("me/small") is None  # a folder of one's own
    assert model_of(tmp_path / "gone") is None
    assert model_of("") is None


def test_the_hint_says_that_there_is_no_tokenizer(published):
    assert "SRC has no tokenizer" in TRANSFORMERS.hint(published)
    (published / "tokenizer.json").write_text("{}")
    assert TRANSFORMERS.hint(published) == (
        f"load it with: import ao_hf, transformers; "
        f"model = transformers.AutoModel.from_pretrained({str(published)!r})"
    )

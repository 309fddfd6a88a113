"""A model with everything that a checkpoint may hold, its checkpoint as others publish it, and bytes."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import QTensor, Spec, load_model, quantize_tensor, save_model
from ao_core.checkpoints import pieces

#: of a format that ao-core knows by itself
INT4 = {"dtype": "int4", "group_size": 32, "scale_dtype": "bfloat16"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(72, 96)
        self.norm = nn.LayerNorm(72)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(3, 40, 72))


class Model(nn.Module):
    """Tied embeddings, linear layers, experts, a convolution, an integer buffer, bfloat16."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(50, 72)
        self.layers = nn.ModuleList([Block() for _ in range(12)])
        self.experts = Experts()
        self.conv = nn.Conv2d(3, 8, 3)
        self.lm_head = nn.Linear(72, 50, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("position_ids", torch.arange(9))
        self.bfloat16()


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """These checkpoints need not survive a power cut, and other tests keep the disk busy."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def build():
    """`build()`: the model with values, the same each time."""

    def make():
        model = Model()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        done = quantize_tensor(model.layers[3].q_proj.weight.detach(), Spec("int8", (1, -1)))
        model.layers[3].q_proj.weight = nn.Parameter(done, requires_grad=False)
        return model

    return make


@pytest.fixture
def source(tmp_path, build):
    """A directory with shards, an index, and files that are no weights, or weights of others."""
    folder = tmp_path / "source"
    save_model(build(), folder, max_shard_size=40_000)
    (folder / "config.json").write_text('{"model": "small"}')
    (folder / "tokenizer.model").write_bytes(b"tokens")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    return folder


@pytest.fixture
def published(tmp_path):
    """`published(shards, name)`: a directory as Hugging Face has it, of plain tensors."""

    def write(shards, name="published"):
        folder = tmp_path / name
        folder.mkdir()
        weight_map = {}
        for number, tensors in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write


@pytest.fixture
def files():
    """`files(folder)`: the bytes of all its files but the reports, which have times in them.

    Of the lock, the hashes of the tensors: what is quantized in memory has no source.
    """

    def read(folder):
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        found = {p.name: p.read_bytes() for p in paths if not p.name.startswith("ao_report")}
        if "ao.lock.json" in found:
            hashes = json.loads(found["ao.lock.json"])["tensors"]
            found["ao.lock.json"] = json.dumps(hashes).encode()
        return found

    return read


@pytest.fixture
def in_memory(source, tmp_path, files):
    """`in_memory(config, size)`: files of the model that is loaded, quantized and saved."""
    from ao_core import quantize_

    def make(config, size, **options):
        model = Model()
        load_model(model, source)
        quantize_(model, config, **options)
        assert any(isinstance(p, QTensor) for p in model.parameters())
        save_model(model, tmp_path / "in_memory", max_shard_size=size)
        return files(tmp_path / "in_memory")

    return make


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few kilobytes, so that small checkpoints have several."""
    monkeypatch.setattr(pieces, "SIZE", 30_000)

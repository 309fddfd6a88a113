"""Small models of transformers with random weights, and their folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, logging

import ao_hf  # noqa: F401  # registers ao

sys.path.insert(0, str(Path(__file__).parent))
logging.disable_progress_bar()


def make_llama(**changes):
    """Two layers, with sizes that are no multiples of a group."""
    options = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "initializer_range": 0.1, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(options | changes))).eval()


@pytest.fixture
def dense(tmp_path):
    """The folder of a dense model."""
    make_llama().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def tokens():
    return torch.tensor([[5, 6, 7, 8], [0, 0, 9, 3]])


@pytest.fixture
def llama():
    return make_llama


@pytest.fixture
def contents():
    return contents_of


def contents_of(folder: Path) -> dict[str, object]:
    """What is in a folder, but for the order in headers, which safetensors does not promise.

    Bytes of each file by name; of safetensors files the metadata, and bytes, dtype and shape of tensors.
    """
    found: dict[str, object] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                found[file.name] = (opened.metadata(), {n: _bytes(t) for n, t in tensors.items()})
        else:
            found[file.name] = file.read_bytes()
    return found


def _bytes(tensor):
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw

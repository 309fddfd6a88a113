"""Shapes with random weights: the same bytes as a model that is loaded, and what does not fit is computed."""

from __future__ import annotations

import json

import pytest
import torch

from ao_core import QTensor
from ao_core.ext import UnknownNameError
from ao_hf.generation import Workload, runner_of
from ao_hf.generation.presets import PRESETS, Preset, free_memory, random_model, stored_bytes

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 64,
}  # fmt: skip
SMALL = {
    "small": Preset("llama", SIZES),
    "tied": Preset("llama", SIZES | {"tie_word_embeddings": True}),
    "experts": Preset("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("ao_hf.generation.presets.PRESETS", PRESETS | SMALL)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("recipe", [None, "int8_weight_only", "int4_weight_only"])
def test_a_model_has_the_bytes_that_are_computed(name, recipe):
    loaded = random_model(name, recipe, device="cpu")
    parameters = list(loaded.model.parameters())
    # in the layouts of files: those of kernels may have tables beside the codes
    stored = [
        p.canonical().stored_bytes if isinstance(p, QTensor) else p.nbytes for p in parameters
    ]
    assert stored_bytes(name, recipe) == sum(stored)
    weight = loaded.model.model.layers[1].self_attn.q_proj.weight
    assert isinstance(weight, QTensor) == (recipe is not None)
    assert len({id(p) for p in parameters}) == len(parameters)
    sample = runner_of(loaded)(Workload(6, 3))
    assert sample.decode > 0
    assert torch.isfinite(loaded.model(torch.ones(1, 3, dtype=torch.long)).logits).all()


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.738), ("llama-3-8b", 8.030), ("llama-3.1-8b", 8.030), ("llama-3.2-1b", 1.236),
     ("mixtral-8x7b", 46.70)],
)  # fmt: skip
def test_known_shapes_have_the_known_numbers_of_parameters(name, billions):
    assert stored_bytes(name) == pytest.approx(2e9 * billions, rel=0.003)


def test_no_preset_of_that_name(ao):
    with pytest.raises(UnknownNameError, match="Did you mean 'llama-3-8b'"):
        stored_bytes("llama-3-8")
    assert "Did you mean 'llama-3-8b'" in ao("bench", "--preset", "llama-3-8").stderr
    both = ao("bench", "folder", "--preset", "llama-3-8b")
    assert (both.exit_code, "give either MODEL or --preset" in both.stderr) == (2, True)
    assert "give either MODEL or --preset" in ao("bench").stderr


def test_what_does_not_fit_is_computed(ao, tmp_path, monkeypatch):
    from ao_hf.generation.worker import contender

    monkeypatch.setattr(
        "ao_hf.commands.bench._runners", lambda found, stack: {n: contender(**o) for n, o in found.items()}
    )  # fmt: skip
    needed = stored_bytes("small", "int4_weight_only")
    assert needed < stored_bytes("small")
    monkeypatch.setattr("ao_hf.generation.presets.free_memory", lambda device: needed / 0.9 + 100)
    out = tmp_path / "out.json"
    options = [
        "--prompt-lengths",
        "8",
        "--new-tokens",
        "3",
        "--rounds",
        "1",
        "--device",
        "cpu",
        "--json",
        out,
    ]
    result = ao("bench", "--preset", "small", "--recipe", "int4_weight_only", *options)
    assert result.exit_code == 0, result.output
    assert "not measured: bfloat16: its weights alone take" in result.stdout
    assert "× int4_weight_only" in result.stdout
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["contender"] for row in found["rows"]] == ["int4_weight_only"]
    assert found["not_measured"] == {"bfloat16": stored_bytes("small")}
    monkeypatch.setattr("ao_hf.generation.presets.free_memory", lambda device: 1000)
    nothing = ao("bench", "--preset", "small", *options)
    assert "--preset: nothing fits into" in nothing.stderr


def test_free_memory():
    assert 1e7 < free_memory("cpu") < 1e14

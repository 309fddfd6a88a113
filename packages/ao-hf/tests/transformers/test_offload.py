"""Quantized folders with modules on "disk": weights are read from the folder, at every call."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaModel, MixtralConfig, MixtralForCausalLM

import ao_hf.accelerate
from ao_core import QTensor, quantize_
from ao_core.ext import ConfigError
from ao_quant import quantize_checkpoint

#: by name: the whole model, a layer, and what a plan makes of little memory
PLACES = {
    "all": {"": "disk"},
    "layer": {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu",
              "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu"},
    "plan": "auto",
}  # fmt: skip


@pytest.fixture(params=["untied", "tied"])
def folder(request, llama, tmp_path):
    model = llama(tie_word_embeddings=request.param == "tied").to(torch.bfloat16)
    quantize_(model, "int4_weight_only")
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder, places, **options):
    limit = {"max_memory": {"cpu": 20_000, "disk": 10**9}} if places == "auto" else {}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, **limit, **options)


def offloaded(model):
    return {name for name, tensor in model.state_dict().items() if tensor.is_meta}


@torch.no_grad()
def logits(model, tokens):
    return model(tokens).logits


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_the_same_bits_as_in_memory(place, dtype, folder, tokens, contents, tmp_path):
    options = {} if dtype is None else {"dtype": dtype}
    whole = AutoModelForCausalLM.from_pretrained(folder, **options)
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    model = load(folder, PLACES[place], offload_folder=tmp_path / "unused", **options)
    on_disk = offloaded(model)
    assert on_disk
    assert (place == "all") == (on_disk == set(model.state_dict()))
    for _ in range(2):  # what was read is dropped again
        assert torch.equal(logits(model, tokens), logits(whole, tokens))
    assert offloaded(model) == on_disk
    ids = [m.generate(tokens, max_new_tokens=3, do_sample=False) for m in (model, whole)]
    assert torch.equal(*ids)
    assert model.get_memory_footprint() < whole.get_memory_footprint()
    assert not list((tmp_path / "unused").iterdir())
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    # what is saved from it is what is saved from the whole model
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path / "again")
    whole.save_pretrained(tmp_path / "expected")
    assert contents(tmp_path / "again") == contents(tmp_path / "expected")


def test_another_class_of_model(folder, tokens):
    """Its names are others than those in the files."""
    model = LlamaModel.from_pretrained(folder, device_map={"": "disk"})
    whole = LlamaModel.from_pretrained(folder)
    assert not any(isinstance(p, QTensor) for p in model.parameters())
    with torch.no_grad():
        found, expected = (m(tokens).last_hidden_state for m in (model, whole))
    assert torch.equal(found, expected)


def test_dispatched_after_loading(folder, tokens, contents, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = logits(model, tokens)
    model.save_pretrained(tmp_path / "expected")
    model = ao_hf.accelerate.dispatch_model(model, PLACES["layer"], offload_dir=tmp_path / "disk")
    assert offloaded(model)
    assert torch.equal(logits(model, tokens), expected)
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "expected")


def test_joined_experts_are_refused(tmp_path):
    """The files have each expert alone, so the weight of the model is nowhere on disk."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_local_experts": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "quantized", "int8_weight_only")
    with pytest.raises(ConfigError, match=r"experts.*joined.*save_pretrained"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", device_map={"": "disk"})
    AutoModelForCausalLM.from_pretrained(tmp_path / "quantized").save_pretrained(
        tmp_path / "joined"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "joined", device_map={"": "disk"})
    assert offloaded(model) == set(model.state_dict())
    assert logits(model, torch.tensor([[1, 2, 3]])).isfinite().all()

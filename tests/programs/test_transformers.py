"""Architectures of transformers: quantized, run, generated with, trained through, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import LANGUAGE_MODELS, MODELS, outputs

from ao_core import (
    FqnToConfig,
    QTensor,
    dequantize_,
    load_model,
    quantize_,
    quantize_checkpoint,
    save_model,
)
from ao_core.ext.numerics import sqnr
from ao_sparsity import sparsify_

#: a recipe and the least SQNR in dB of the model's output beside the same model dequantized
RECIPES = {
    "int8_weight_only": 50,
    "int4_weight_only/g32-asymmetric": 50,
    "int8_dynamic_activation_int8_weight": 20,
    "float8_dynamic_activation_float8_weight": 10,
}
NAMES = sorted(MODELS)
ROW, G32 = "int8_weight_only", "int4_weight_only/g32-asymmetric"
SPARSE = "int8_dynamic_activation_int8_semi_sparse_weight"


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_is_that_of_the_dequantized_model(name: str, recipe: str) -> None:
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    report = quantize_(model, recipe)
    assert report.with_status("changed")
    dense = copy.deepcopy(model)
    assert dequantize_(dense)
    with torch.no_grad():
        quality = float(sqnr(outputs(dense, inputs), outputs(model, inputs)))
    assert RECIPES[recipe] <= quality


def test_gradients_of_inputs_with_checkpointing(name: str) -> None:
    model = MODELS[name].build().train()
    quantize_(model, "int8_weight_only")
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = outputs(model, MODELS[name].inputs()).square().mean()
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with_gradient = [
        n for n, p in trained.items() if p.grad is not None and p.grad.isfinite().all()
    ]
    # the head or a branch that this output does not need has none
    assert len(with_gradient) > len(trained) / 3


def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, inputs = MODELS[name].build(torch.bfloat16), MODELS[name].inputs()
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    quantize_(model, "int4_weight_only/g32-asymmetric")
    save_model(model, tmp_path)
    other = MODELS[name].build(torch.bfloat16)
    load_model(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(outputs(model, inputs), outputs(other, inputs))


def test_opened_without_ao_it_is_an_error(name: str, tmp_path: Path, without_ao_hf: None) -> None:
    """`from_pretrained` must not go on with random values for what is quantized."""
    model = MODELS[name].build()
    if name in LANGUAGE_MODELS:
        model.save_pretrained(tmp_path / "dense")
        quantize_checkpoint(tmp_path / "dense", tmp_path / "model", "int8_weight_only")
    else:
        quantize_(model, "int8_weight_only")
        save_model(model, tmp_path / "model")
        model.config.save_pretrained(tmp_path / "model")
    with pytest.raises(RuntimeError, match="mismatched_sizes"):
        MODELS[name].model.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("written", [n for n in NAMES if MODELS[n].writes])
def test_generates_the_tokens_of_the_dequantized_model(written: str) -> None:
    model = MODELS[written].build()
    quantize_(model, "int8_weight_only")
    dense = copy.deepcopy(model)
    dequantize_(dense)
    inputs = {"input_ids": MODELS[written].inputs()["input_ids"]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        if written == "t5" and "cache_implementation" in options:
            continue  # its cache has two halves, which are made on demand
        made = [
            m.generate(**inputs, max_new_tokens=4, do_sample=False, **options)
            for m in (model, dense)
        ]
        assert torch.equal(*made)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["llama", "mixtral", "qwen3_moe", "gpt_oss"])
def test_compiled(compiled: str) -> None:
    model, inputs = MODELS[compiled].build(), MODELS[compiled].inputs()
    quantize_(model, "int8_weight_only")
    with torch.no_grad():
        expected = outputs(model, inputs)
        made = outputs(torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
    assert float(sqnr(expected, made)) > 60


def test_parameters_as_one_vector() -> None:
    """`param.data` is what utilities of torch and of PEFT assign to."""
    model = MODELS["bert"].build()
    quantize_(model, "int8_weight_only")
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(torch.zeros_like(vector), model.parameters())
    assert any(isinstance(p, QTensor) for p in model.parameters())
    assert not any(p.dequantize().any() for p in model.parameters() if isinstance(p, QTensor))


@pytest.mark.filterwarnings("ignore::ao_core.errors.DequantizeWarning")
@pytest.mark.parametrize(("tied", "recipe"), [("llama", ROW), ("gemma3", ROW), ("gpt2", G32)])
def test_a_bigger_vocabulary(tied: str, recipe: str) -> None:
    """A head that is tied to its embedding stays quantized, and tied."""
    model, inputs = MODELS[tied].build(), MODELS[tied].inputs()
    quantize_(model, FqnToConfig({"lm_head": recipe, "*": recipe}))
    with torch.no_grad():
        before = outputs(model, inputs)
        model.resize_token_embeddings(140)
        after = outputs(model, inputs)
    assert after.shape[-1] == 140
    assert float(sqnr(before, after[..., :128])) > 35  # values are rounded once more
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == isinstance(head, QTensor) == (tied != "llama")


def test_speech_is_transcribed() -> None:
    model = MODELS["whisper"].build()
    features = MODELS["whisper"].inputs()["input_features"]
    quantize_(model, ROW)
    dense = copy.deepcopy(model)
    dequantize_(dense)
    made = [m.generate(features, max_new_tokens=4) for m in (model, dense)]
    assert torch.equal(*made)


@pytest.mark.parametrize("recipe", ["semi_sparse_weight", SPARSE])
def test_sparse_vision(recipe: str) -> None:
    model, inputs = MODELS["vit"].build(), MODELS["vit"].inputs()
    assert sparsify_(model, recipe).with_status("changed")
    dense = copy.deepcopy(model)
    dequantize_(dense)
    with torch.no_grad():
        assert float(sqnr(outputs(dense, inputs), outputs(model, inputs))) > 20

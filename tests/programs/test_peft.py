"""Adapters of PEFT over quantized models: training, switching off, merging, saving."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from zoo import MODELS, language_model, outputs

from ao_core import dequantize_, quantize_
from ao_core.ext.numerics import sqnr

RECIPES = (
    "int4_weight_only/g32-asymmetric",
    "nf4_weight_only",
    "int8_weight_only",
    "gguf_weight_only/q8_0",
)
ADAPTERS = {"lora": {}, "dora": {"use_dora": True}}
INPUTS = MODELS["llama"].inputs()


def adapted(recipe: str, kind: str, targets: str | list[str] = "all-linear") -> peft.PeftModel:
    model = language_model()
    quantize_(model, recipe)
    # the adapter begins with random values, so that it does something
    config = peft.LoraConfig(
        r=4,
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **ADAPTERS[kind],
    )
    return peft.get_peft_model(model, config)


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return outputs(model.eval(), INPUTS)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_merged(recipe: str, kind: str) -> None:
    """A merged model is the base model with the adapter, but for quantizing the sum again."""
    model = adapted(recipe, kind)
    with_adapter = output(model)
    with model.disable_adapter():
        without = output(model)
    least = 23 if "8" in recipe else 4
    assert float(sqnr(with_adapter, without)) < 3
    for safe in (False, True):
        merged = copy.deepcopy(model).merge_and_unload(safe_merge=safe)
        assert float(sqnr(with_adapter, output(merged))) > least
    model.merge_adapter()
    assert float(sqnr(with_adapter, output(model))) > least
    model.unmerge_adapter()
    assert float(sqnr(with_adapter, output(model))) > least


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_trained(recipe: str, kind: str, autocast: bool, tmp_path: Path) -> None:
    model = peft.prepare_model_for_kbit_training(adapted(recipe, kind))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**INPUTS, labels=INPUTS["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    model.save_pretrained(tmp_path)
    base = language_model()
    quantize_(base, recipe)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(output(model), output(loaded))


def test_merged_into_a_dense_model() -> None:
    """`dequantize_` before a merge loses nothing of a small adapter."""
    model = adapted("int4_weight_only/g32-asymmetric", "lora")
    with_adapter = output(model)
    dequantize_(model)
    assert float(sqnr(with_adapter, output(model.merge_and_unload()))) > 60


@pytest.mark.filterwarnings("ignore::ao_core.errors.DequantizeWarning")
@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_initialised_from_the_weight(method: str) -> None:
    model = language_model()
    before = output(model)
    quantize_(model, "int8_weight_only")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=method)
    made = output(peft.get_peft_model(model, config))
    assert float(sqnr(before, made)) > 20


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.LoHaConfig(r=2, target_modules=["q_proj"]),
        peft.VeraConfig(r=4, target_modules=["q_proj"]),
        peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"]),
        peft.AdaLoraConfig(init_r=4, target_modules=["q_proj"], total_step=10),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_adapters(config: peft.PeftConfig) -> None:
    model = language_model()
    quantize_(model, "int8_weight_only")
    adapter = peft.get_peft_model(model, config)
    trained = [p for p in adapter.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    loss = adapter(**INPUTS, labels=INPUTS["input_ids"]).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    expected = output(adapter)
    assert float(sqnr(expected, output(adapter.merge_and_unload()))) > 25

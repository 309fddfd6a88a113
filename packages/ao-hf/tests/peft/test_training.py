"""Adapters over quantized weights are trained, saved, loaded, switched and compiled as over dense ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from ao_core import QTensor, quantize_
from ao_core.ext import ConfigError
from ao_hf.peft import (
    QuantizedLoraLinear,
    load_adapter,
    over_quantized,
    prepare_model_for_kbit_training,
)
from ao_optim import AdamW8bit, CPUOffloadOptimizer

NF4 = "nf4_weight_only"
TOKENS = torch.arange(18).view(2, 9) * 5 % 98 + 1
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "qalora": {"use_qalora": True, "qalora_group_size": 8},
}


def adapted(model: nn.Module, kind: str = "lora", recipe: str = NF4) -> peft.PeftModel:
    quantize_(model, recipe)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | KINDS[kind]
        return peft.get_peft_model(model, over_quantized(peft.LoraConfig(**options)))


def trained(
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 4,
    autocast: bool = False,
) -> list[float]:
    made = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_trained_saved_and_loaded(
    llama: Callable[..., nn.Module], kind: str, tmp_path: Path
) -> None:
    model = adapted(llama(), kind)
    before = {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, QTensor)}
    assert len(before) == 8
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.05
    for name, values in before.items():
        assert torch.equal(model.get_parameter(name).dequantize(), values)
    model.save_pretrained(tmp_path)
    base = llama()
    quantize_(base, NF4)
    made = load_adapter(base, tmp_path)
    assert torch.equal(logits(made), logits(model))
    assert not any(p.requires_grad for p in made.parameters())
    assert any(isinstance(module, QuantizedLoraLinear) for module in made.modules())
    if kind == "qalora":
        return
    # the folder is PEFT's own
    base = llama()
    quantize_(base, NF4)
    plain = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-5)


def test_training_goes_on(llama: Callable[..., nn.Module], tmp_path: Path) -> None:
    """With `is_trainable`, loaded without memory for adapters that are replaced anyway."""
    model = adapted(llama(), "dora")
    model.save_pretrained(tmp_path)
    base = llama()
    quantize_(base, NF4)
    made = load_adapter(base, tmp_path, is_trainable=True, low_cpu_mem_usage=True)
    assert trained(made) == trained(model)


def test_several_adapters(llama: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = adapted(llama())
    base = logits(model)
    trained(model)
    model.save_pretrained(tmp_path)
    first = logits(model)
    other = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    model.add_adapter("other", over_quantized(other))
    model.set_adapter("other")
    second = logits(model)
    assert not torch.equal(first, second)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    model.load_adapter(tmp_path, "again")
    model.set_adapter("again")
    assert torch.equal(logits(model), first)
    model.delete_adapter("other")
    assert torch.equal(logits(model), first)
    model.base_model.set_adapter(["default", "again"])
    model.merge_adapter()
    model.unmerge_adapter()
    model.set_adapter("again")
    assert torch.equal(logits(model), first)


def test_which_layers_are_ours(llama: Callable[..., nn.Module]) -> None:
    """Dense layers, embeddings and other modules stay PEFT's; the configuration stays the caller's."""
    model = llama()
    quantize_(model, NF4, lambda module, name: "q_proj" in name)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "embed_tokens"])
    made = peft.get_peft_model(model, over_quantized(config))
    assert config._custom_modules is None
    kinds = {
        name.split(".")[-1]: type(module)
        for name, module in made.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert kinds == {
        "q_proj": QuantizedLoraLinear,
        "k_proj": peft.tuners.lora.Linear,
        "embed_tokens": peft.tuners.lora.Embedding,
    }
    with pytest.raises(ValueError, match="IA3Config: only LoraConfig"):
        over_quantized(peft.IA3Config())


@pytest.mark.parametrize("reentrant", [False, True])
def test_prepared(llama: Callable[..., nn.Module], reentrant: bool) -> None:
    """Checkpointing is on and gives the same gradients; PEFT's own function would leave it off."""
    plain = adapted(llama())
    model = llama()
    quantize_(model, NF4)
    prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    assert model.is_activation_checkpointing
    model = adapted(model)
    assert trained(model.train()) == pytest.approx(trained(plain), abs=1e-6)


def test_dtypes_of_a_prepared_model(llama: Callable[..., nn.Module]) -> None:
    model = llama(torch.bfloat16)
    quantize_(model, NF4, lambda module, name: isinstance(module, nn.Linear) and "head" not in name)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    dtypes = {name.split(".")[-2]: p.dtype for name, p in model.named_parameters()}
    assert dtypes["embed_tokens"] == dtypes["q_proj"] == torch.bfloat16
    assert dtypes["input_layernorm"] == dtypes["lm_head"] == torch.float32
    assert not any(p.requires_grad for p in model.parameters())
    model = adapted(model, "dora")
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.05
    assert logits(model).dtype == torch.float32
    # a head tied to the table of the embedding is multiplied
    model = llama(torch.bfloat16, tie_word_embeddings=True)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.lm_head.weight.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_prepared_without_checkpointing() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    with pytest.raises(ConfigError, match="Sequential has no activation_checkpointing_enable"):
        prepare_model_for_kbit_training(model)
    assert model[0].weight.requires_grad
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize("optimizer", [AdamW8bit, CPUOffloadOptimizer])
def test_qlora(llama: Callable[..., nn.Module], optimizer: type[torch.optim.Optimizer]) -> None:
    """Four bits, scales that are quantized too, checkpointing, autocast, and 8-bit state."""
    model = llama(torch.bfloat16)
    quantize_(model, NF4)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.canonical().scale.spec.dtype == "f8e4m3"
    model = adapted(prepare_model_for_kbit_training(model)).train()
    losses = trained(model, optimizer, steps=6, autocast=True)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_compiled(llama: Callable[..., nn.Module]) -> None:
    """One graph without a break has the losses of eager mode."""
    eager, model = adapted(llama(), "dora"), adapted(llama(), "dora")
    torch._dynamo.reset()
    made = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert trained(made, steps=2) == pytest.approx(trained(eager, steps=2), abs=1e-5)


def test_compiled_where_activations_are_quantized(layers: Callable[..., Any]) -> None:
    model, _ = layers("int8_dynamic_activation_int8_weight", use_dora=True)
    layer, x = model.base_model.model.up, torch.randn(6, 96)
    torch._dynamo.reset()
    made = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(made(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    """FSDP2 on four processes, and on two, is one process with all rows; see the worker."""
    worker = Path(__file__).with_name("fsdp_worker.py")
    command = [sys.executable, str(worker), str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-3000:]

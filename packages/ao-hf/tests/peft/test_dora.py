"""DoRA over quantized weights is DoRA over their values, without making these at every step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from ao_core import QTensor, dequantize_
from ao_hf.peft import variants
from ao_hf.peft.variants import QuantizedDoraLayer

RECIPES = ("nf4_weight_only", "int4_weight_only/g32-asymmetric", "int8_weight_only")


def over_values(model: nn.Module) -> nn.Module:
    """PEFT's own DoRA over the values of the weights, with the same adapters."""
    base = copy.deepcopy(model)
    config = copy.deepcopy(model.peft_config["default"])
    adapters = {n: p for n, p in base.state_dict().items() if "lora_" in n}
    plain = base.unload()
    dequantize_(plain)
    config._custom_modules = None
    made = peft.get_peft_model(plain, config)
    assert not made.load_state_dict(adapters, strict=False).unexpected_keys
    return made


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_dense_dora(layers: Callable[..., Any], recipe: str, dropout: float) -> None:
    model, _ = layers(recipe, use_dora=True, use_rslora=True, lora_dropout=dropout)
    dense = over_values(model)
    x = torch.randn(3, 5, 96)
    outputs = []
    for made in (model, dense):
        torch.manual_seed(1)
        y = made.train()(x)
        y.square().mean().backward()
        outputs.append(y.detach())
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    others = dict(dense.named_parameters())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 6
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("recipe", [*RECIPES, "int8_dynamic_activation_int8_weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms(layers: Callable[..., Any], recipe: str, dtype: torch.dtype) -> None:
    """In every dtype, under autocast, and where matmuls quantize activations, the norms are exact."""
    model, _ = layers(recipe, dtype, use_dora=True)
    layer = model.base_model.model.up
    weight, a, b = (
        layer.base_layer.weight,
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
    )
    with torch.autocast("cpu", torch.bfloat16):
        norms = layer.lora_magnitude_vector["default"].norms(weight, a, b, 0.7)
    wanted = weight.dequantize(torch.float64) + 0.7 * b.double() @ a.double()
    torch.testing.assert_close(norms.double(), wanted.norm(dim=1), rtol=2e-6, atol=0)


def test_weights_are_dequantized_once(
    layers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[torch.Tensor] = []
    original = variants.row_squares

    def count(weight: torch.Tensor) -> torch.Tensor:
        measured.append(weight)
        return original(weight)

    monkeypatch.setattr(variants, "row_squares", count)
    model, _ = layers("nf4_weight_only", use_dora=True)
    assert len(measured) == 2
    x = torch.randn(7, 96)
    for _ in range(3):
        model(x).sum().backward()
    assert len(measured) == 2
    # another weight has other norms
    with torch.no_grad():
        model.base_model.model.up.base_layer.weight.mul_(1.5)
    after = model(x)
    assert len(measured) == 3
    torch.testing.assert_close(after, over_values(model)(x), rtol=1e-5, atol=1e-5)


def test_copies_and_pickles(layers: Callable[..., Any]) -> None:
    model, _ = layers("int8_weight_only", use_dora=True)
    x = torch.randn(2, 96)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    layer = model.base_model.model.up.lora_magnitude_vector["default"]
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight, layer.weight)


def test_rows_of_zeros_stay_finite(layers: Callable[..., Any]) -> None:
    """A row of zeros has no direction: PEFT's own layer gives NaN."""
    model, _ = layers("int8_weight_only", init_lora_weights=True)
    layer = model.base_model.model.up
    with torch.no_grad():
        weight = layer.base_layer.weight.dequantize()
        weight[3] = 0
        layer.base_layer.weight.copy_(weight)
    dora = QuantizedDoraLayer()
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    dora.update_layer(base_layer=layer.base_layer, lora_A=a.weight, lora_B=b.weight, scaling=1.0)
    assert dora.weight[3] == 0
    x = torch.randn(5, 96)
    y = dora(
        x,
        lora_A=a,
        lora_B=b,
        scaling=1.0,
        base_layer=layer.base_layer,
        base_result=layer.base_layer(x),
    )
    y.sum().backward()
    assert y.abs().max() < 1e-5  # nothing is added at first
    assert dora.weight.grad.isfinite().all()
    assert isinstance(layer.base_layer.weight, QTensor)

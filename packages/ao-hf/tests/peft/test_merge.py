"""Merging adds adapters to the weight and rounds once; unmerging brings back every code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from ao_core import QTensor, dequantize_, quantize_
from ao_core.ext import ConfigError, QuantizationError
from ao_core.ext.numerics import sqnr
from ao_hf.peft import QuantizedLoraLinear, merge_report, over_quantized
from ao_hf.peft.initialize import adapted_layers

RECIPES = ("nf4_weight_only", "int4_weight_only/g32-asymmetric", "int8_weight_only")
SHAPES = {"up.weight": (56, 96), "down.weight": (40, 56)}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_bias": True},
    "dora": {"use_dora": True},
}


def codes(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{part}": leaf.clone()
        for name, parameter in model.named_parameters()
        if isinstance(parameter, QTensor)
        for part, leaf in parameter.leaves()
    }


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_merged_and_unmerged(layers: Callable[..., Any], recipe: str, kind: str) -> None:
    model, _ = layers(recipe, **KINDS[kind])
    x = torch.randn(4, 96)
    before, y = codes(model), model(x)
    model.merge_adapter(safe_merge=kind == "dora")
    merged = model(x)
    least, most = (35, 60) if "int8" in recipe else (9, 30)
    assert least < float(sqnr(y, merged)) < most
    assert not equal(codes(model), before)
    model.unmerge_adapter()
    assert equal(codes(model), before)
    assert torch.equal(model(x), y)
    # a switched off adapter is taken out of the weight too
    model.merge_adapter()
    with model.disable_adapter():
        model(x)
    assert equal(codes(model), before)
    plain = copy.deepcopy(model).merge_and_unload()
    assert not any(isinstance(module, QuantizedLoraLinear) for module in plain.modules())
    assert torch.equal(plain(x), merged)


def test_adapters_merged_in_turn_are_rounded_once(layers: Callable[..., Any]) -> None:
    model, _ = layers("int4_weight_only/g32-asymmetric")
    model.add_adapter("other", model.peft_config["default"])
    both = copy.deepcopy(model)
    both.base_model.set_adapter(["default", "other"])
    both.merge_adapter()
    model.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="additionally merging"):
        model.merge_adapter(["other"])
    assert equal(codes(model), codes(both))
    assert model.base_model.model.up.merged_adapters == ["default", "other"]


def test_a_shared_weight_stays_what_it_is(llama: Callable[..., nn.Module]) -> None:
    """A head tied to the embedding: PEFT's own layer would merge the adapter into both."""
    model = llama(tie_word_embeddings=True)
    quantize_(model, "int8_weight_only")
    table = model.model.embed_tokens.weight
    assert table is model.lm_head.weight
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    with pytest.warns(UserWarning, match="tie"):
        adapted = peft.get_peft_model(model, over_quantized(config))
    before = table.dequantize()
    with pytest.warns(UserWarning, match="tie"):
        adapted.merge_adapter()
    assert torch.equal(model.model.embed_tokens.weight.dequantize(), before)
    assert not torch.equal(model.lm_head.base_layer.weight.dequantize(), before)


def test_moved_while_merged(layers: Callable[..., Any]) -> None:
    model, _ = layers("int8_weight_only", lora_bias=True)
    before = codes(model)
    model.merge_adapter()
    model.to(torch.bfloat16)
    model.unmerge_adapter()
    layer = model.base_model.model.up.base_layer
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert equal(codes(model), before)


@pytest.mark.parametrize("safe", [False, True])
def test_sums_with_nan_are_not_merged(layers: Callable[..., Any], safe: bool) -> None:
    model, _ = layers("nf4_weight_only")
    layer = model.base_model.model.up
    before = codes(model)
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = torch.nan
    with pytest.raises(QuantizationError, match="NaN or inf; nothing was merged"):
        layer.merge(safe_merge=safe)
    assert not layer.merged
    assert equal(codes(model), before)


def test_bias_of_an_adapter_needs_one(layers: Callable[..., Any]) -> None:
    model, _ = layers("nf4_weight_only", lora_bias=True)
    layer = model.base_model.model.up
    layer.base_layer.bias = None
    with pytest.raises(ConfigError, match="no bias to add it to"):
        layer.merge()


@pytest.mark.parametrize("kind", KINDS)
def test_dense_by_then(layers: Callable[..., Any], kind: str) -> None:
    """After `dequantize_` nothing is rounded, and PEFT's own merge serves."""
    model, _ = layers("int4_weight_only/g32-asymmetric", **KINDS[kind])
    x = torch.randn(4, 96)
    y = model(x)
    dequantize_(model)
    half = copy.deepcopy(model).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert float(sqnr(y, half.float())) > 30
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    model.merge_adapter()
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)


def test_report(layers: Callable[..., Any]) -> None:
    """int8 holds the sum as well as it held the weight; 4 bits lose an adapter of half a step."""
    model, _ = layers("int8_weight_only")
    originals = {name: torch.randn(shape) * 0.05 for name, shape in SHAPES.items()}
    for name, layer in adapted_layers(model):
        with torch.no_grad():
            layer.base_layer.weight.copy_(originals[f"{name}.weight"])
            delta = layer.get_delta_weight("default")
            layer.lora_B["default"].weight.mul_(0.2 * 0.05 / delta.square().mean().sqrt())
    kept = codes(model)
    report = merge_report(model, originals)
    assert equal(codes(model), kept)
    assert [record.name for record in report.records] == ["up", "down"]
    for record in report.records:
        assert -0.5 < record.loss_db <= 0.5
        assert 40 < record.sqnr_db < 46
        # the adapter is a fifth of the weight, 14 dB
        assert 12 < record.sqnr_db - record.adapter_db < 16
        layer = model.base_model.model.get_submodule(record.name)
        made = layer.with_adapters(["default"])
        assert record.sqnr_db == float(sqnr(made.wanted, made.weight.dequantize()))
    assert str(report).count("\n") == 3
    assert report.to_dict()["records"][0]["name"] == "up"

    model, _ = layers("int4_weight_only/g32-asymmetric", lora_alpha=0.1)
    report = merge_report(model)
    assert -10 < report.worst().adapter_db < 3
    assert report.records[0].base_db is report.records[0].loss_db is None


def test_report_of_no_adapter(layers: Callable[..., Any]) -> None:
    model, before = layers("int8_weight_only")
    with pytest.raises(ConfigError, match="no quantized layer has such adapters"):
        merge_report(model, adapter_names=["absent"])
    del before["down.weight"]
    with pytest.raises(ConfigError, match=r"originals has no 'down.weight'"):
        merge_report(model, before)

"""QA-LoRA: an adapter that is one number for each group goes into the zero points, and no code changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ao_core import QTensor, quantize_tensor
from ao_core.ext import ConfigError, QuantizationError
from ao_core.ext.numerics import sqnr
from ao_hf.peft import merge_report
from ao_hf.peft.weights import shifted
from ao_quant import Int4WeightOnlyConfig, IntxWeightOnlyConfig, NF4WeightOnlyConfig

#: every kind of zero point, codes of LUTs and of odd widths, scales that are quantized
CONFIGS = {
    "int": Int4WeightOnlyConfig(32),
    "float": Int4WeightOnlyConfig(32, zero_point="float"),
    "none": Int4WeightOnlyConfig(32, symmetric=True),
    "int3": IntxWeightOnlyConfig(3, 32),
    "nf4": NF4WeightOnlyConfig(double_quant=True),
    "gguf": "gguf_weight_only/q5_k",
}


def adapted(layers: Callable[..., Any], name: str, dtype: torch.dtype = torch.float32) -> Any:
    group = {"nf4": 64}.get(name, 32)
    options = {"use_qalora": True, "qalora_group_size": group, "lora_alpha": 1}
    return layers(CONFIGS[name], dtype, target_modules=["wide"], **options)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_merged_equals_unmerged(layers: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    model = adapted(layers, name, dtype)
    layer = model.base_model.model.wide
    x = torch.randn(3, 2, 256).to(dtype)
    base, y, before = layer.base_layer(x), layer(x), layer.base_layer.weight
    assert 0 < float(sqnr(y, base)) < 32  # it does something
    wanted = before.dequantize(torch.float32) + layer.get_delta_weight("default")
    model.merge_adapter()
    merged = layer.base_layer.weight
    assert float(sqnr(wanted, merged.dequantize(torch.float32))) > 100
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(layer(x), y, rtol=tolerance, atol=tolerance * float(y.abs().max()))
    assert torch.equal(merged.canonical().qdata, before.canonical().qdata)
    assert (merged.spec.zero_point, merged.spec.dtype) == ("offset", before.spec.dtype)
    assert merged.canonical().stored_bytes < 24 * 256
    (record,) = merge_report(model).records
    assert record.adapter_db > 80
    model.unmerge_adapter()
    assert layer.base_layer.weight is before


def test_two_adapters(layers: Callable[..., Any]) -> None:
    model = adapted(layers, "int")
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    layer = model.base_model.model.wide
    x = torch.randn(5, 256)
    y, codes = layer(x), layer.base_layer.weight.canonical().qdata
    model.merge_adapter()
    torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.base_layer.weight.canonical().qdata, codes)


def test_trained(layers: Callable[..., Any]) -> None:
    """What is one number for each group can be learned."""
    model = adapted(layers, "int")
    layer = model.base_model.model.wide
    x = torch.randn(64, 256)
    wanted = (layer.base_layer(x) + x.view(64, 8, 32).mean(2) @ torch.randn(8, 24) * 3).detach()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(60):
        loss = (layer(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


def test_what_zero_points_cannot_take(layers: Callable[..., Any]) -> None:
    model, _ = layers("int8_weight_only", use_qalora=True, qalora_group_size=8)
    with pytest.raises(QuantizationError, match=r"multiple of 96"):
        model.merge_adapter()
    assert not model.base_model.model.up.merged
    with pytest.raises(ConfigError, match="goes with no other variant"):
        layers("int8_weight_only", use_qalora=True, qalora_group_size=8, use_dora=True)
    # beside another kind of adapter, the sum is quantized again
    model.add_adapter("other", type(model.peft_config["default"])(r=2, target_modules=["up"]))
    layer = model.base_model.model.up
    model.base_model.set_adapter(["default", "other"])
    x = torch.randn(4, 96)
    y = layer(x)
    layer.merge()
    assert 30 < float(sqnr(y, layer(x))) < 60


@pytest.mark.parametrize("config", ["codebook_weight_only", "bf16"])
def test_formats_without_zero_points(config: str) -> None:
    from ao_core import Spec
    from ao_quant import CodebookWeightOnlyConfig

    weight = torch.randn(8, 128)
    spec = (
        CodebookWeightOnlyConfig(group_size=128).spec((8, 128), torch.float32)
        if config != "bf16"
        else Spec("bf16", (1, -1), "none")
    )
    quantized = quantize_tensor(weight, spec)
    assert isinstance(quantized, QTensor)
    with pytest.raises(QuantizationError, match="no zero points"):
        shifted(quantized, torch.zeros(8, 1), 128)

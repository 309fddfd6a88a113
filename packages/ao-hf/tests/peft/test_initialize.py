"""Adapters that begin with what quantization lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core.ext import CheckpointError, ConfigError, QuantizationError
from ao_core.ext.calibration import best_of_rank
from ao_core.ext.numerics import sqnr
from ao_hf.peft import initialize_adapters_, moments

RECIPE = "int4_weight_only/g32-asymmetric"


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (5, 5)])
def test_best_of_rank(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    for rank in (1, 3, 5):
        b, a = best_of_rank(matrix, rank)
        wanted = u[:, :rank] * s[:rank] @ v[:rank]
        torch.testing.assert_close((b.double() @ a.double()), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(b.norm(dim=0), a.norm(dim=1), rtol=1e-5, atol=1e-5)
    b, a = best_of_rank(matrix, 9)
    assert (b.shape, a.shape) == ((shape[0], 9), (9, shape[1]))
    torch.testing.assert_close(b @ a, matrix, rtol=1e-4, atol=1e-4)
    b, a = best_of_rank(torch.zeros(shape), 2)
    assert not b.any()
    assert not a.any()


@pytest.mark.parametrize("shape", [(7, 12), (12, 7)])
@pytest.mark.parametrize("rows", [40, 4])
def test_best_of_rank_for_outputs(shape: tuple[int, int], rows: int) -> None:
    """The outputs are nearer than any other matrices of this rank could bring them, by an SVD of them."""
    matrix = torch.randn(shape)
    x = torch.randn(rows, shape[1], dtype=torch.float64) * torch.logspace(-2, 2, shape[1])
    outputs = x @ matrix.double().t()
    sizes = torch.linalg.svdvals(outputs)
    b, a = best_of_rank(matrix, 3, x.t() @ x / rows)
    error = (outputs - x @ (b.double() @ a.double()).t()).norm()
    least = sizes[3:].norm()
    assert 0.999 * least <= error <= 1.001 * least + 1e-4 * sizes[0]
    plain_b, plain_a = best_of_rank(matrix, 3)
    assert (outputs - x @ (plain_b @ plain_a).double().t()).norm() > error


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("method", ["loftq", "pissa"])
def test_nearer_to_the_original(layers: Callable[..., Any], method: str, dora: bool) -> None:
    """The layer computes with the weight that its record says, whatever the scaling."""
    model, before = layers(RECIPE, r=8, lora_alpha=3, use_dora=dora)
    records = initialize_adapters_(model, before, method)
    assert [record.name for record in records] == ["up", "down"]
    layer = model.base_model.model.up
    x = torch.eye(96)
    made = (layer(x) - layer.base_layer.bias).t()
    assert float(sqnr(before["up.weight"], made)) == pytest.approx(records[0].after_db, abs=1e-3)
    for record in records:
        assert 15 < record.before_db < 25
        assert record.before_db + 0.2 < record.after_db < 40


@pytest.mark.parametrize("method", ["loftq", "pissa"])
def test_nearer_in_outputs(layers: Callable[..., Any], method: str) -> None:
    """With data: records are of the outputs, and these are nearer than without."""
    data = [torch.randn(20, 96) * torch.logspace(-1, 1, 96), torch.randn(2, 9, 96)]
    inputs = torch.cat([batch.reshape(-1, 96) for batch in data])
    found: dict[bool, float] = {}
    for with_data in (False, True):
        torch.manual_seed(0)
        model, before = layers(RECIPE, r=8, target_modules=["up", "wide"])
        layer = model.base_model.model.up
        wanted = inputs @ before["up.weight"].t()
        codes = layer.base_layer.weight.dequantize()
        plain = float(sqnr(wanted, inputs @ codes.t()))
        records = initialize_adapters_(model, before, method, data=data if with_data else None)
        model.eval()
        found[with_data] = float(sqnr(wanted, layer(inputs) - layer.base_layer.bias))
        if with_data:
            assert [record.of for record in records] == ["outputs", "weights"]
            assert records[0].after_db == pytest.approx(found[True], abs=0.01)
            assert records[0].before_db == pytest.approx(plain, abs=0.01)
    if method == "loftq":  # PiSSA quantizes the rest anew, which need not be nearer
        assert found[False] + 1 < found[True] < found[False] + 30
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_data_in_portions(layers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where moments would take too much memory, later layers see what earlier adapters lead to."""
    data, seen = [torch.randn(64, 96)], []
    for limit in (moments.LIMIT, 8 * 96**2):
        torch.manual_seed(0)
        model, before = layers(RECIPE)
        monkeypatch.setattr(moments, "LIMIT", limit)
        records = initialize_adapters_(model, before, data=data)
        assert [record.name for record in records] == ["up", "down"]
        seen.append([record.after_db for record in records])
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] != seen[1][1]
    assert seen[0][1] == pytest.approx(seen[1][1], abs=3)


def test_data_that_does_not_serve(layers: Callable[..., Any]) -> None:
    model, before = layers(RECIPE)
    kept = [p.clone() for p in model.parameters() if p.requires_grad]
    x = torch.randn(4, 96)
    with pytest.raises(ConfigError, match="data is empty"):
        initialize_adapters_(model, before, data=[])
    with pytest.raises(ConfigError, match="cannot be called with it"):
        initialize_adapters_(model, before, data=[{"y": x}])
    with pytest.raises(QuantizationError, match="inputs of up have NaN or inf"):
        initialize_adapters_(model, before, data=[x / 0])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(kept, trained, strict=True))


def test_more_rank_and_more_steps_are_nearer(layers: Callable[..., Any]) -> None:
    found = []
    originals: dict[str, torch.Tensor] = {}
    for rank, steps in ((2, 1), (8, 1), (8, 4), (20, 4)):
        torch.manual_seed(0)
        model, originals = layers(RECIPE, r=rank)
        codes = model.base_model.model.up.base_layer.weight.dequantize()
        records = initialize_adapters_(model, originals, steps=steps)
        found.append(records[0].after_db)
        after = model.base_model.model.up.base_layer.weight.dequantize()
        assert torch.equal(codes, after) == (steps == 1)
    assert found == sorted(found)
    assert found[-1] > found[0] + 2


def test_pissa_of_peft_takes_the_quantized_weight(layers: Callable[..., Any]) -> None:
    model, before = layers("int8_weight_only", init_lora_weights="pissa")
    layer = model.base_model.model.up
    made = layer.base_layer.weight.dequantize() + layer.get_delta_weight("default")
    assert 35 < float(sqnr(before["up.weight"], made)) < 60
    # the adapter is the largest part of the weight
    assert layer.get_delta_weight("default").norm() > 0.3 * before["up.weight"].norm()


@pytest.mark.parametrize("sharded", [False, True])
def test_from_a_folder(layers: Callable[..., Any], tmp_path: Path, sharded: bool) -> None:
    model, before = layers(RECIPE)
    if sharded:
        for name, tensor in before.items():
            save_file({name: tensor}, tmp_path / f"{name}.safetensors")
        index = {"weight_map": {name: f"{name}.safetensors" for name in before}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(before, tmp_path / "model.safetensors")
    expected = [record.after_db for record in initialize_adapters_(model, before)]
    assert [record.after_db for record in initialize_adapters_(model, tmp_path)] == expected
    with pytest.raises(CheckpointError, match="name the folder of a checkpoint"):
        initialize_adapters_(model, tmp_path / "absent")


def test_from_a_module_with_a_prefix(llama: Callable[..., nn.Module]) -> None:
    """Checkpoints of a model without its head lack the first part of the names."""
    import peft

    from ao_core import quantize_
    from ao_hf.peft import over_quantized

    model = llama()
    quantize_(model, RECIPE)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, over_quantized(config))
    for originals in (llama(), llama().model):
        (record,) = initialize_adapters_(adapted, originals)
        assert record.name == "model.layers.0.self_attn.q_proj"
        assert record.after_db > record.before_db


def test_errors(layers: Callable[..., Any]) -> None:
    model, before = layers(RECIPE)
    with pytest.raises(ConfigError, match="method='svd' is unknown; use one of loftq, pissa"):
        initialize_adapters_(model, before, "svd")
    with pytest.raises(ConfigError, match="steps=0"):
        initialize_adapters_(model, before, steps=0)
    with pytest.raises(ConfigError, match="no quantized layer has such an adapter"):
        initialize_adapters_(model, before, adapter_name="absent")
    with pytest.raises(ConfigError, match="shape"):
        initialize_adapters_(model, {**before, "up.weight": torch.randn(3, 3)})
    with pytest.raises(ConfigError, match="has no 'up.weight'"):
        initialize_adapters_(model, {"other": torch.randn(3, 3)})
    model.merge_adapter()
    with pytest.raises(ConfigError, match="has merged adapters"):
        initialize_adapters_(model, before)
    with pytest.raises(ConfigError, match="initialize_adapters_"):
        layers(RECIPE, init_lora_weights="loftq", loftq_config={"loftq_bits": 4})
    model, before = layers(RECIPE, use_qalora=True, qalora_group_size=8)
    with pytest.raises(ConfigError, match="has an adapter of QA-LoRA"):
        initialize_adapters_(model, before)

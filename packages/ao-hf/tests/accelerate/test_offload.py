"""Quantized models on disk, by device maps, and what is read from where."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import set_module_tensor_to_device
from small import DTYPES, FORMATS, build, empty, logits
from torch import nn

import ao_hf.accelerate as ao
from ao_core import QTensor, quantize_, save_model
from ao_core.ext import CheckpointError, ConfigError, QuantizationError, StorageError, UnsupportedOp


def on_disk(model: nn.Module, layer: str = "model.layers.1") -> dict[str, str]:
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    return {name: "disk" if name == layer else "cpu" for name in (*names, "model.rotary_emb")}


@pytest.fixture(params=FORMATS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    built = build()
    quantize_(built, request.param)
    return built


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_model_on_disk(model: nn.Module, dtype: torch.dtype, tmp_path: Path) -> None:
    model = model.to(dtype)
    expected = logits(model)
    stored = sum(p.stored_bytes if isinstance(p, QTensor) else p.nbytes for p in model.parameters())
    offloaded = ao.disk_offload(model, tmp_path, execution_device="cpu")
    assert torch.equal(logits(offloaded), expected)
    assert torch.equal(logits(offloaded), expected)  # after everything was dropped again
    assert all(p.is_meta for p in offloaded.parameters())
    # what is on disk is the quantized model: no dense copy of it
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 1.2 * stored + 20_000


def test_one_layer_on_disk(model: nn.Module, tmp_path: Path) -> None:
    expected = logits(model)
    dispatched = ao.dispatch_model(model, on_disk(model), offload_dir=tmp_path)
    assert torch.equal(logits(dispatched), expected)
    meta = {name for name, p in dispatched.named_parameters() if p.is_meta}
    assert meta == {n for n, _ in dispatched.named_parameters() if n.startswith("model.layers.1.")}
    assert {type(p).__name__ for n, p in dispatched.named_parameters() if n in meta} == {
        "QTensor",
        "Parameter",
    }


def test_without_disk_it_is_accelerates_own(model: nn.Module) -> None:
    expected = logits(model)
    places = on_disk(model, "none")
    assert torch.equal(logits(ao.dispatch_model(model, places, force_hooks=True)), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_read_from_where_it_was_saved(tied: bool, tmp_path: Path) -> None:
    """A checkpoint of ao is the offload folder itself: nothing else is written."""
    model = build(tied)
    quantize_(model, "int8_weight_only")
    expected = logits(model)
    save_model(model, tmp_path)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    loaded = ao.load_checkpoint_and_dispatch(empty(tied), tmp_path, on_disk(model))
    assert torch.equal(logits(loaded), expected)
    whole = ao.disk_offload(empty(tied), tmp_path)
    assert torch.equal(logits(whole), expected)
    assert {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()} == before


@pytest.mark.parametrize("places", [None, "auto", "sequential"])
def test_loaded_by_a_plan(model: nn.Module, places: str | None, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    loaded = ao.load_checkpoint_and_dispatch(empty(), tmp_path, places, max_memory={"cpu": "1GiB"})
    assert torch.equal(logits(loaded), logits(model))
    tied = ao.load_checkpoint_and_dispatch(build(), tmp_path)  # over values that were there
    assert torch.equal(logits(tied), logits(model))


def test_ties_are_ties_again(tmp_path: Path) -> None:
    model = build(tied=True)
    quantize_(model, "int8_weight_only")
    save_model(model, tmp_path)
    loaded: Any = ao.load_checkpoint_and_dispatch(empty(tied=True), tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_device_map_counts_stored_bytes() -> None:
    """A model of 4-bit weights fits where the same in float32 does not."""
    model = build()
    dense, layers = copy.deepcopy(model), ["LlamaDecoderLayer"]
    quantize_(model, "nf4_weight_only")
    stored = sum(p.stored_bytes if isinstance(p, QTensor) else p.nbytes for p in model.parameters())
    biggest = sum(p.nbytes for p in dense.model.layers[0].parameters())
    limit = {"cpu": stored + biggest, "disk": 2**30}
    assert "disk" in accelerate.infer_auto_device_map(dense, limit, layers).values()
    assert "disk" in accelerate.infer_auto_device_map(model, limit, layers).values()
    assert set(ao.infer_auto_device_map(model, limit, layers).values()) == {"cpu"}
    # the true sizes, and no less
    assert "disk" in ao.infer_auto_device_map(model, {"cpu": stored // 2}, layers).values()
    same = accelerate.infer_auto_device_map(dense, limit, layers)
    assert ao.infer_auto_device_map(dense, limit, layers) == same
    assert all(not p.is_meta for p in model.parameters())


def test_plan_by_the_sizes_on_disk(tmp_path: Path) -> None:
    model = build()
    quantize_(model, "nf4_weight_only")
    save_model(model, tmp_path)
    limit: dict[int | str, int | str] = {"cpu": 40_000}
    loaded = ao.load_checkpoint_and_dispatch(
        empty(), tmp_path, "auto", limit, ["LlamaDecoderLayer"]
    )
    meta = [name for name, p in loaded.named_parameters() if p.is_meta]
    assert 0 < len(meta) < len(list(loaded.parameters()))
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accelerates_own_functions_say_what_to_call(
    model: nn.Module, dtype: torch.dtype, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedOp, match=r"ao_hf\.accelerate\.disk_offload"):
        accelerate.disk_offload(model.to(dtype), tmp_path)
    with pytest.raises(StorageError, match=r"save_model and register_checkpoints of ao_hf"):
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    weight = next(p for p in model.parameters() if isinstance(p, QTensor))
    assert torch.equal(weight.view(weight.dtype), weight)


def test_refusals(model: nn.Module, tmp_path: Path) -> None:
    places = on_disk(model)
    with pytest.raises(ConfigError, match=r"offload_dir=None.*model\.layers\.1"):
        ao.dispatch_model(model, places)
    with pytest.raises(ConfigError, match="offload_index"):
        ao.dispatch_model(model, places, offload_dir=tmp_path, offload_index={"a": {}})
    with pytest.raises(ConfigError, match="device_map='all'"):
        ao.load_checkpoint_and_dispatch(model, tmp_path, "all")
    with pytest.raises(QuantizationError, match="on the meta device"):
        ao.dispatch_model(empty(), places, offload_dir=tmp_path)
    save_model(nn.Linear(3, 3), tmp_path / "other")
    with pytest.raises(CheckpointError, match="another model"):
        ao.disk_offload(model, tmp_path / "other")
    other = build()
    other.lm_head = nn.Linear(48, 95, bias=False)
    save_model(other, tmp_path / "shape")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \(95, 48\)"):
        ao.load_checkpoint_and_dispatch(model, tmp_path / "shape")
    trained = build()
    quantize_(trained, "int8_mixed_precision_training")
    with pytest.raises(ConfigError, match=r"low-precision training .*unwrap_"):
        ao.disk_offload(trained, tmp_path / "trained")
    with pytest.raises(ConfigError, match="low-precision training"):
        ao.dispatch_model(trained, places, offload_dir=tmp_path / "trained")
    assert not any(p.is_meta for p in (*model.parameters(), *trained.parameters()))
    assert logits(model).isfinite().all()


def test_a_damaged_file_is_noticed(model: nn.Module, tmp_path: Path) -> None:
    offloaded = ao.disk_offload(model, tmp_path)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        logits(offloaded)


def test_names_that_accelerate_looks_for() -> None:
    """It rebuilds a parameter by its class, and spares this one by its name."""
    assert QTensor.__name__ == "QTensor"
    assert '"QTensor"' in inspect.getsource(set_module_tensor_to_device)

"""What other programs do to save a quantized model says that they cannot: none writes wrong values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from zoo import MODELS, outputs

import ao_core
from ao_core import load_model, quantize_
from ao_core.ext import CheckpointError, StorageError, UnsupportedOp

RECIPES = ("int8_weight_only", "int4_weight_only/g32-asymmetric", "int8_weight_only_training")


def quantized(name: str, recipe: str) -> nn.Module:
    model = MODELS[name].build()
    quantize_(model, recipe)
    return model


SAVERS: dict[str, Callable[[nn.Module, Path], object]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "Accelerator.save_model": lambda model, folder: accelerate.Accelerator(cpu=True).save_model(
        model, folder
    ),
    "save_file": lambda model, folder: save_file(model.state_dict(), folder / "model.safetensors"),
    "save_model": lambda model, folder: save_model(model, folder / "model.safetensors"),
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_writes_nothing_wrong(saver: str, recipe: str, tmp_path: Path, without_ao_hf: None) -> None:
    with pytest.raises(StorageError, match=r"call ao_core\.save_model"):
        SAVERS[saver](quantized("llama", recipe), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_offloading_to_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOp, match=r"numpy of a quantized tensor"):
        accelerate.disk_offload(
            quantized("llama", "int8_weight_only"), tmp_path, execution_device="cpu"
        )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_loaded_into_a_model_without_memory(name: str, tmp_path: Path) -> None:
    """Built on the meta device: whole, or an error that names the buffers which no checkpoint has."""
    model, inputs = quantized(name, "int8_weight_only"), MODELS[name].inputs()
    ao_core.save_model(model, tmp_path)
    with torch.device("meta"):
        other = MODELS[name].model(MODELS[name].config()).eval()
    kept = [n for n, m in other.named_modules() for _ in m._non_persistent_buffers_set]
    if kept:
        with pytest.raises(CheckpointError, match="buffers that are not persistent"):
            load_model(other, tmp_path)
        return
    load_model(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(outputs(model, inputs), outputs(other, inputs))

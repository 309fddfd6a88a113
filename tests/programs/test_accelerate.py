"""Offloading and saving by accelerate."""

from __future__ import annotations

import copy
from pathlib import Path

import accelerate
import pytest
import torch
from zoo import MODELS, outputs

from ao_core import load_model, quantize_, save_model

INPUTS = MODELS["llama"].inputs()


@pytest.fixture(params=["int8_weight_only", "nf4_weight_only"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    built = MODELS["llama"].build()
    quantize_(built, request.param)
    return built


@torch.no_grad()
def test_dispatched(model: torch.nn.Module) -> None:
    expected = outputs(model, INPUTS)
    device_map = accelerate.infer_auto_device_map(model, {"cpu": "1GiB"})
    assert torch.equal(
        outputs(
            accelerate.dispatch_model(copy.deepcopy(model), device_map, force_hooks=True), INPUTS
        ),
        expected,
    )


@torch.no_grad()
def test_offloaded_to_the_cpu(model: torch.nn.Module) -> None:
    expected = outputs(model, INPUTS)
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(outputs(offloaded, INPUTS), expected)


@torch.no_grad()
def test_built_empty_and_assigned(model: torch.nn.Module) -> None:
    with accelerate.init_empty_weights():
        other = MODELS["llama"].model(MODELS["llama"].config()).eval()
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(outputs(other, INPUTS), outputs(model, INPUTS))


@torch.no_grad()
def test_built_empty_and_loaded(model: torch.nn.Module, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    with accelerate.init_empty_weights():
        other = MODELS["llama"].model(MODELS["llama"].config()).eval()
    load_model(other, tmp_path)
    assert torch.equal(outputs(other, INPUTS), outputs(model, INPUTS))


def test_prepared(model: torch.nn.Module) -> None:
    """`Accelerator.prepare` in bfloat16: what a training loop of a user does."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    assert outputs(prepared, INPUTS).isfinite().all()

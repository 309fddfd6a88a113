"""What an `Accelerator` saves of quantized models, and training that goes on from it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from small import FORMATS, TOKENS, build, empty, logits
from torch import nn

import ao_hf.accelerate as ao
from ao_core import QTensor, load_model, quantize_
from ao_optim import AdamW8bit


@pytest.mark.parametrize("recipe", FORMATS)
def test_saved_from_where_it_is(recipe: str, tmp_path: Path) -> None:
    """In memory, dispatched, on disk and compiled: the same files, and the same model in them."""
    model = build(tied=True)
    quantize_(model, recipe)
    expected = logits(model)
    accelerator = accelerate.Accelerator(cpu=True)
    ao.save_model(accelerator, model, tmp_path / "whole", max_shard_size="20KB")
    places = {"model.layers.0": "disk", "model.embed_tokens": "cpu", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    there = {
        "compiled": torch.compile(model, backend="eager"),
        "dispatched": ao.dispatch_model(
            copy.deepcopy(model), places, offload_dir=tmp_path / "layer"
        ),
    }
    files = sorted(f.name for f in (tmp_path / "whole").iterdir())
    assert len(files) > 2
    for name, one in there.items():
        ao.save_model(accelerator, one, tmp_path / name, max_shard_size="20KB")
        assert files == sorted(f.name for f in (tmp_path / name).iterdir())
        for file in files:
            saved = (tmp_path / name / file).read_bytes()
            assert saved == (tmp_path / "whole" / file).read_bytes(), (name, file)
    other: Any = empty(tied=True)
    load_model(other, tmp_path / "dispatched")
    assert torch.equal(logits(other), expected)
    assert other.lm_head.weight is other.model.embed_tokens.weight

    offloaded = ao.disk_offload(model, tmp_path / "disk")
    ao.save_model(accelerator, offloaded, tmp_path / "again")
    load_model(other, tmp_path / "again")
    assert torch.equal(logits(other), expected)


def adapted() -> Any:
    """4-bit weights that stay, and a head, biases and norms that are trained."""
    model = build()
    quantize_(model.model, "nf4_weight_only")
    torch.manual_seed(1)
    return model


def train(accelerator: accelerate.Accelerator, model: Any, optimizer: Any, steps: int) -> Any:
    losses = []
    for _ in range(steps):
        for batch in TOKENS:  # two micro-batches
            with accelerator.accumulate(model):
                loss = model(input_ids=batch[None], labels=batch[None]).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    return torch.stack(losses)


def prepared(mixed_precision: str) -> tuple[accelerate.Accelerator, Any, Any]:
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2
    )
    model = adapted()
    optimizer = AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_training_goes_on_from_a_saved_state(mixed_precision: str, tmp_path: Path) -> None:
    whole = train(*prepared(mixed_precision), steps=4)
    assert whole[-2:].mean() < whole[:2].mean() - 0.1

    accelerator, model, optimizer = prepared(mixed_precision)
    ao.register_checkpoints(accelerator)
    first = train(accelerator, model, optimizer, steps=2)
    accelerator.save_state(str(tmp_path))
    assert sorted(f.name for f in tmp_path.iterdir() if f.is_dir()) == ["ao_model_0"]
    saved = {name: t.clone() for name, t in model.state_dict().items()}

    accelerator, model, optimizer = prepared(mixed_precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    ao.register_checkpoints(accelerator)
    accelerator.load_state(str(tmp_path))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
        assert isinstance(tensor, QTensor) == isinstance(saved[name], QTensor)
    rest = train(accelerator, model, optimizer, steps=2)
    assert torch.equal(torch.cat([first, rest]), whole)


def test_hooks_go_away_and_leave_other_states_alone(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    dense = accelerator.prepare(nn.Linear(4, 4))
    before = dense.weight.clone()
    accelerator.save_state(str(tmp_path / "own"))
    remove = ao.register_checkpoints(accelerator)
    with torch.no_grad():
        dense.weight.zero_()
    accelerator.load_state(str(tmp_path / "own"))
    assert torch.equal(dense.weight, before)
    remove()
    accelerator.save_state(str(tmp_path / "after"))
    assert not (tmp_path / "after" / "ao_model_0").exists()

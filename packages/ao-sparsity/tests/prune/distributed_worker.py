"""One rank of test_distributed.py: masks put on before and after sharding, kept, saved and loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ao_core.testing.programs import one_of_the_ranks
from ao_sparsity import (
    GradualPruning,
    LinearSchedule,
    Movement,
    NofM,
    Unstructured,
    apply_masks,
    attach_masks,
    keep_masks,
    prune_magnitude,
    remove_masks,
)

#: a callback for after the step, made of model and optimizer
Hook = Callable[[], object]
MASKS = ("0.weight_sparsity_mask", "2.weight_sparsity_mask")


def make_model() -> nn.Module:
    """96 rows divide by 2, 33 do not: the second layer has shards of different sizes."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 33))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, steps: int, hook: Callable[[nn.Module, torch.optim.Optimizer], Hook]):
    """The same data on every rank, so that mean gradients are those of one process."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    after = hook(model, optimizer)
    for step in range(steps):
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        after()


def compare(one: nn.Module, sharded: nn.Module, masks: dict[str, Tensor]) -> None:
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    for name, value in one.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)
    for name, mask in masks.items():
        layer = sharded.get_submodule(name.partition(".")[0])
        assert isinstance(layer.weight_sparsity_mask, DTensor), name
        assert layer.weight_sparsity_mask.to_local().shape == layer.weight.to_local().shape
        assert torch.equal(full(layer.weight) == 0, ~mask), name


def keeping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Hook:
    keep_masks(model, optimizer)
    return lambda: None


def gradual(model: nn.Module, optimizer: torch.optim.Optimizer) -> Hook:
    keep_masks(model, optimizer)
    return GradualPruning(model, Unstructured(0.7), LinearSchedule(0.7, end=5)).step


def movement(model: nn.Module, optimizer: torch.optim.Optimizer) -> Hook:
    scores = Movement(model, optimizer)
    pruning = GradualPruning(model, NofM(1, 4), LinearSchedule(0.75, end=4), method=scores.prune)
    keep_masks(model, optimizer)
    return pruning.step


def main(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    found = prune_magnitude(make_model(), NofM(2, 4))
    for order in ("before", "after"):
        one, sharded = make_model(), make_model()
        apply_masks(one, found)
        if order == "before":
            apply_masks(sharded, found)
            shard(sharded, mesh)
        else:
            shard(sharded, mesh)
            again = prune_magnitude(sharded, NofM(2, 4))
            assert all(torch.equal(again.masks[name], mask) for name, mask in found.masks.items())
            apply_masks(sharded, again)
        train(one, 4, keeping)
        train(sharded, 4, keeping)
        compare(one, sharded, found.masks)
        check_checkpoint(sharded, mesh, folder / order)
        assert remove_masks(sharded) == ["0.weight", "2.weight"]
        assert not list(sharded.buffers())
        sys.stdout.write(f"{order}: ok\n")
    for hook in (gradual, movement):
        one, sharded = make_model(), shard(make_model(), mesh)
        train(one, 6, hook)
        train(sharded, 6, hook)
        compare(one, sharded, {n: one.get_buffer(f"{n}_sparsity_mask") for n in found.masks})
        sys.stdout.write(f"{hook.__name__}: ok\n")


def check_checkpoint(model: nn.Module, mesh: DeviceMesh, folder: Path) -> None:
    """Saved in shards, and loaded in shards into a model that had no masks."""
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder)
    loaded = shard(make_model(), mesh)
    attach_masks(loaded, state)
    target = get_model_state_dict(loaded)
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(loaded, target)
    for name, value in model.state_dict().items():
        assert torch.equal(full(loaded.state_dict()[name]), full(value)), name
    assert tuple(n for n in loaded.state_dict() if "mask" in n) == MASKS


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])):
        main(Path(sys.argv[1]))

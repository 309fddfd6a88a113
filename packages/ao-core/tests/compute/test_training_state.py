"""What a training run keeps is plain: optimizer state, checkpoints, and models that load them without ao."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import WHOLE, ComputeWeight, Spec
from ao_core.testing.base import gaussian, same_bits
from ao_core.testing.warm import run_python

TENSOR, ROW = (WHOLE, WHOLE), (1, WHOLE)

#: in a process that cannot import ao: state dicts into dense layers, printed as a checksum
LOADER = """
import sys, warnings
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("ao_"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torch import nn
folder = sys.argv[1]
sums = []
for kind in ("saved", "distributed"):
    model = nn.Sequential(nn.Linear(70, 33), nn.SiLU(), nn.Linear(33, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict()}
    if kind == "saved":
        state = torch.load(f"{folder}/state.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
    else:
        dcp.load(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
    model.load_state_dict(state["model"])
    sums.append(sum(p.double().abs().sum().item() for p in model.parameters()))
print(*sums, not [name for name in sys.modules if name.startswith("ao_")])
"""


def specs(block: tuple[int, ...], dtype: str = "f8e4m3", grad: str = "f8e5m2") -> list[Spec]:
    spec = Spec(dtype, block)
    return [replace(spec, act=replace(spec, dtype=act)) for act in (dtype, grad, grad)]


def converted(model: nn.Sequential, block: tuple[int, ...]) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(ComputeWeight(layer.weight.detach(), *specs(block)))
    return model


def dense_model(seed: int = 0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(70, 33), nn.SiLU(), nn.Linear(33, 5))
    for parameter in model.parameters():
        parameter.data.copy_(gaussian(parameter.shape, seed=seed) / 8)
    return model


@pytest.fixture(params=[TENSOR, ROW], ids=["tensorwise", "rowwise"])
def trained(request: pytest.FixtureRequest) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = converted(dense_model(), request.param)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        F.mse_loss(model(gaussian((6, 70), seed=2)), gaussian((6, 5), seed=3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_optimizer_state_is_plain(
    trained: tuple[nn.Sequential, torch.optim.Optimizer],
) -> None:
    _, optimizer = trained
    kinds = {type(value) for state in optimizer.state.values() for value in state.values()}
    assert kinds == {Tensor}


@pytest.mark.slow
@pytest.mark.parametrize("trained", [TENSOR], indirect=True, ids=["tensorwise"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_load_without_ao(
    trained: tuple[nn.Sequential, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, optimizer = trained
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = run_python("-c", LOADER, tmp_path, check=True)
    expected = sum(p.double().abs().sum().item() for p in model.parameters())
    saved, distributed, alone = found.stdout.split()
    assert float(saved) == float(distributed) == expected
    assert alone == "True"
    # and back, into a converted model
    other = converted(dense_model(seed=4), TENSOR)
    back = {"model": other.state_dict()}
    dcp.load(back, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert isinstance(other[0].weight, ComputeWeight)


def test_converting_a_loaded_model_changes_nothing_else(
    trained: tuple[nn.Sequential, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, _ = trained
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = dense_model(seed=4)
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    before = copy.deepcopy(loaded.state_dict())
    block = model[0].weight.matmuls.output.block
    again = converted(loaded, block)
    assert list(again.state_dict()) == list(before)
    for fqn, tensor in again.state_dict().items():
        plain = tensor.memory if isinstance(tensor, ComputeWeight) else tensor
        assert same_bits(plain, before[fqn])
    x = gaussian((6, 70), seed=2)
    assert torch.equal(again(x), model(x))


def test_a_pickled_model_is_still_in_training(
    trained: tuple[nn.Sequential, torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, _ = trained
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert isinstance(again[0].weight, ComputeWeight)
    assert again[0].weight.matmuls == model[0].weight.matmuls
    assert again[0].weight.requires_grad
    x = gaussian((6, 70), seed=2)
    assert torch.equal(again(x), model(x))

"""One rank of test_ranks.py: prepared models under FSDP2 and DDP train as one process does, and are saved."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ao_core import Config, quantize_
from ao_core.testing.base import gaussian
from ao_core.testing.programs import one_of_the_ranks
from ao_quant import Int4WeightOnlyConfig, Int8DynamicActivationInt4WeightConfig, QATConfig
from ao_quant.qat import Delay

#: what is prepared, and whether training starts in high precision
CASES: dict[str, tuple[Config, str, int]] = {
    "weights": (Int4WeightOnlyConfig(32), "chosen", 2),
    "activations": (Int8DynamicActivationInt4WeightConfig(32), "chosen", 0),
    "learned": (Int4WeightOnlyConfig(32), "learned", 0),
}


def make(base: Config, scales: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 47), nn.SiLU(), nn.Linear(47, 64), nn.Linear(64, 10))
    quantize_(model, QATConfig(base, scales=scales))
    return model


def train(model: nn.Module, share: slice, delay: int) -> list[float]:
    """Losses of four steps, averaged over the ranks."""
    x, y = gaussian((8, 3, 64), seed=8)[share], gaussian((8, 3, 10), seed=9)[share]
    # scales are a hundredth of the weights' size
    scales = [p for name, p in model.named_parameters() if name.endswith("_scale")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("_scale")]
    groups = [{"params": weights, "lr": 0.05}, {"params": scales, "lr": 5e-4}]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)
    waits = Delay(model, delay) if delay else None
    losses = []
    for _ in range(4):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if waits is not None:
            waits.step()
        mean = loss.detach().clone()
        if share != slice(None):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def check(name: str, share: slice, folder: Path) -> None:
    base, scales, delay = CASES[name]
    alone = make(base, scales)
    shards, copies = copy.deepcopy(alone), copy.deepcopy(alone)
    for layer in shards:
        fully_shard(layer)
    fully_shard(shards)
    expected = train(alone, slice(None), delay)
    reference = alone.state_dict()
    whole = StateDictOptions(full_state_dict=True)
    for model in (shards, DistributedDataParallel(copies)):
        losses = train(model, share, delay)
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-4
        )
        inner: Any = getattr(model, "module", model)
        near(get_model_state_dict(inner, options=whole), reference)
    # a checkpoint of the shards is plain, and loads into one process
    state = get_model_state_dict(shards)
    dcp.save(state, checkpoint_id=folder / name)
    plain = {key: torch.empty_like(value) for key, value in reference.items()}
    dcp.load(plain, checkpoint_id=folder / name)
    assert all(type(value) is Tensor for value in plain.values())
    fresh = make(base, scales)
    set_model_state_dict(fresh, plain)
    x = gaussian((5, 64), seed=3)
    trained = fresh(x)
    torch.testing.assert_close(trained, alone(x), rtol=0.05, atol=0.05)
    quantize_(fresh, QATConfig(base, "convert", scales))
    assert torch.equal(fresh(x), trained)
    sys.stdout.write(f"{name}: {[round(loss, 4) for loss in losses]}\n")


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])) as rank:
        size = 8 // dist.get_world_size()
        for case in sys.argv[2:]:
            check(case, slice(rank * size, rank * size + size), Path(sys.argv[1]))

"""One rank of test_extras_ranks.py: learned scales are sharded, gathered, reduced and saved."""

from __future__ import annotations

import copy
import sys
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ao_core import ComputeWeight, Spec
from ao_core.compute import extra_tensors, fake_quantized
from ao_core.compute.extras import fit_extras
from ao_core.compute.fake_linear import FakeQuantizedLinear
from ao_core.compute.plain_state import keep_state_plain
from ao_core.spec import ROW, TENSOR
from ao_core.testing.base import gaussian
from ao_core.testing.programs import one_of_the_ranks


def make_model(block: tuple[int, int], sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for position, (k, n) in enumerate(pairwise(sizes)):
        linear = nn.Linear(k, n, bias=position == 1)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(gaussian(parameter.shape, seed=position) / 4)
        matmuls = fake_quantized(Spec("int4", block), "learned_scale", Spec("int8", ROW))
        linear.weight = nn.Parameter(ComputeWeight(linear.weight.detach(), *matmuls))
        fit_extras([(linear, "weight")])
        keep_state_plain(linear)
        layers += [linear, nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, share: slice) -> list[float]:
    """Losses of four steps, averaged over the ranks."""
    x, y = gaussian((8, 3, 14), seed=8)[share], gaussian((8, 3, 5), seed=9)[share]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if share != slice(None):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def check(name: str, block: tuple[int, int], sizes: tuple[int, ...], share: slice) -> None:
    alone = make_model(block, sizes)
    shards = copy.deepcopy(alone)
    for layer in shards:
        if isinstance(layer, FakeQuantizedLinear):
            fully_shard(layer)
    fully_shard(shards)
    for layer in shards:
        for scale in extra_tensors(layer).values():
            assert isinstance(scale, DTensor)
    expected, losses = train(alone, slice(None)), train(shards, share)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert expected[-1] < expected[0]
    full = get_model_state_dict(shards, options=StateDictOptions(full_state_dict=True))
    reference = alone.state_dict()
    assert full.keys() == reference.keys()
    started = make_model(block, sizes).state_dict()
    for key, value in full.items():
        torch.testing.assert_close(value, reference[key], rtol=1e-3, atol=1e-4)
        assert not torch.equal(value, started[key]), key
    sys.stdout.write(f"{name}: {[round(loss, 4) for loss in losses]}\n")


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])) as rank:
        size = 8 // dist.get_world_size()
        mine = slice(rank * size, rank * size + size)
        check("rows", ROW, (14, 12, 7, 5), mine)
        check("groups", (1, 4), (14, 12, 6, 5), mine)
        check("tensor", TENSOR, (14, 12, 5), mine)

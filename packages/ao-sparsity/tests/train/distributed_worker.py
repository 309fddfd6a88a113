"""One rank of test_distributed.py: FSDP2 over sparse layers gives the gradients of one process."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ao_core.ext import ConfigError
from ao_core.testing.base import gaussian
from ao_core.testing.programs import one_of_the_ranks
from ao_sparsity import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    SupermaskLinear,
    squash_masks,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

CONFIG = {
    "0": partial(SemiSparseLinear, decay=0.1),
    "1": SemiSparseActivationLinear,
    "2": partial(SupermaskLinear, blocksize=8, sparsity=0.5),
}


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(22, 35), nn.Linear(35, 19), nn.Linear(19, 21))
    for number, parameter in enumerate(model.parameters()):
        parameter.data.copy_(gaussian(tuple(parameter.shape), seed=number))
    swap_linear_with_semi_sparse_linear(model, CONFIG)
    return model


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model(x).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def main(rank: int) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x = gaussian((4 * world, 22), seed=50)
    expected = gradients(make_model(), x)

    whole = fully_shard(make_model(), mesh=mesh)  # the layers' classes stay
    each = make_model()
    for layer in each:
        fully_shard(layer, mesh=mesh)
    fully_shard(each, mesh=mesh)
    for model in (whole, each):
        found = gradients(model, x[4 * rank : 4 * rank + 4])
        for name, grad in expected.items():
            torch.testing.assert_close(found[name].full_tensor(), grad, rtol=1e-4, atol=1e-5)
    for change in (squash_masks, swap_semi_sparse_linear_with_linear):
        with pytest.raises(ConfigError, match="FSDPModule"):
            change(each)
    with pytest.raises(ConfigError, match="is sharded"):
        squash_masks(whole)
    swap_semi_sparse_linear_with_linear(whole)
    assert [type(layer) for layer in whole] == [nn.Linear] * 3
    with pytest.raises(ConfigError, match="sharded already; swap layers before"):
        swap_linear_with_semi_sparse_linear(whole, CONFIG)
    sys.stdout.write("shards: ok\n")


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])) as rank:
        main(rank)

"""One rank of test_parallel.py: a block under tensor parallelism, alone and with FSDP2."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core import WHOLE, ComputeWeight, Spec
from ao_core.ext import ConfigError
from ao_core.ext.compute import Matmuls, with_float8_all_gather
from ao_core.ext.numerics import sqnr
from ao_core.testing.base import gaussian
from ao_core.testing.programs import one_of_the_ranks
from ao_float8.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    precompute_float8_dynamic_scale_for_fsdp,
)


def specs(block: tuple[int, ...]) -> Matmuls:
    spec = Spec("f8e4m3", block)
    output, backward = (replace(spec, act=replace(spec, dtype=d)) for d in ("f8e4m3", "f8e5m2"))
    return Matmuls(output, backward, backward)


CASES = {"tensorwise": specs((WHOLE, WHOLE)), "rowwise": specs((1, WHOLE)), "dense": None}


class GatheredTypes(TorchDispatchMode):
    """Counts the bytes of all-gathers by the type of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.sizes[out.dtype] = self.sizes.get(out.dtype, 0) + out.numel() * out.element_size()
        return out


class Block(nn.Module):
    """SwiGLU: two layers that take the same input, and one that takes theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(36, 44, bias=False), nn.Linear(36, 44)
        self.down = nn.Linear(44, 36)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def make(given: Any) -> Block:
    block = Block()
    for position, layer in enumerate((block.gate, block.up, block.down)):
        for parameter in layer.parameters():
            parameter.data.copy_(gaussian(parameter.shape, seed=position) / 6)
        if given is not None:
            layer.weight = nn.Parameter(ComputeWeight(layer.weight.detach(), *given))
    return block


def plan() -> dict[str, Any]:
    """The sequence is sharded between blocks; its gathered form is made once."""
    return {
        "": PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), fwd_config_submodule_fqn="up"
        ),
        "gate": Float8ColwiseParallel(),
        "up": Float8ColwiseParallel(),
        "down": Float8RowwiseParallel(output_layouts=Shard(1)),
    }


def whole(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def check_tensor_parallel(name: str) -> None:
    given, rank, ranks = CASES[name], dist.get_rank(), dist.get_world_size()
    alone, parallel = make(given), make(given)
    mesh = init_device_mesh("cpu", (ranks,))
    styles = plan()
    styles[""]._apply(parallel, mesh)
    parallelize_module(parallel, mesh, {key: style for key, style in styles.items() if key})
    x = gaussian((2, 8, 36), seed=5)
    part = x.chunk(ranks, 1)[rank].clone().requires_grad_()
    all_of_it = x.clone().requires_grad_()
    factors = gaussian((2, 8, 36), seed=6)
    with GatheredTypes() as count:
        out = parallel(part)
        (out * factors.chunk(ranks, 1)[rank]).sum().backward()
    expected = alone(all_of_it)
    (expected * factors).sum().backward()
    pairs = [
        (expected.chunk(ranks, 1)[rank], out),
        (all_of_it.grad.chunk(ranks, 1)[rank], part.grad),
    ]
    pairs += [
        (p.grad, whole(q)) for p, q in zip(alone.parameters(), parallel.parameters(), strict=True)
    ]
    found = [float(sqnr(a.detach(), b.detach())) for a, b in pairs]
    # the scales of pieces of weights and of activations between are not those of the whole
    assert min(found) > (90 if given is None else 20), found
    values = x.numel()
    # the input, and the gradient of the output
    expected_bytes = (
        {torch.uint8: 2 * values} if name == "tensorwise" else {torch.float32: 8 * values}
    )
    assert count.sizes == expected_bytes, count.sizes
    sys.stdout.write(f"{name}: {[round(value, 1) for value in found]} dB, {count.sizes}\n")


def check_with_fsdp() -> None:
    """Two ranks hold halves of each weight, and those two share them with two others."""
    given = with_float8_all_gather(CASES["tensorwise"])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, parallel = make(given), make(given)
    styles = plan()
    styles[""]._apply(parallel, mesh["tp"])
    parallelize_module(parallel, mesh["tp"], {key: style for key, style in styles.items() if key})
    fully_shard(parallel, mesh=mesh["dp"])
    batches, losses = gaussian((2, 2, 8, 36), seed=5), [[], []]
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    for model, own in ((alone, losses[0]), (parallel, losses[1])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for _ in range(3):
            if model is alone:
                loss = sum(alone(x).square().mean() for x in batches) / 2
                loss.backward()
            else:
                precompute_float8_dynamic_scale_for_fsdp(model)
                loss = model(batches[dp].chunk(2, 1)[tp]).square().mean() / 2
                loss.backward()
                loss = loss.detach().clone()
                dist.all_reduce(loss)
                loss /= 2
            optimizer.step()
            optimizer.zero_grad()
            own.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=3e-2), losses
    assert losses[0][-1] < 0.9 * losses[0][0]
    sys.stdout.write(f"with FSDP2: {losses}\n")


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])):
        for name in CASES:
            check_tensor_parallel(name)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with pytest.raises(ConfigError, match="Embedding"):
            parallelize_module(nn.Embedding(4, 4), mesh, Float8ColwiseParallel())
        if dist.get_world_size() == 4:
            check_with_fsdp()

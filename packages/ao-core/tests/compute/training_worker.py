"""One rank of test_training_ranks.py: DDP and FSDP2, with memory gathered and with codes."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core import WHOLE, ComputeWeight, Spec
from ao_core.compute import Matmuls
from ao_core.compute.gather import precompute_scales, with_float8_all_gather
from ao_core.errors import UnsupportedOp
from ao_core.testing.base import gaussian
from ao_core.testing.programs import one_of_the_ranks

BF16 = torch.bfloat16
TENSOR, ROW, COLUMN, SQUARE = (WHOLE, WHOLE), (1, WHOLE), (WHOLE, 1), (16, 16)


def matmul(dtype: str, grad: str, block: tuple[int, ...]) -> Spec:
    return Spec(dtype, block, act=Spec(grad, TENSOR if block == TENSOR else ROW))


def specs(dtype: str, output: tuple[int, ...], grad_input: tuple[int, ...], grad: str) -> Matmuls:
    block = TENSOR if output == TENSOR else ROW
    return Matmuls(
        matmul(dtype, dtype, output),
        matmul(dtype, grad, grad_input),
        matmul(dtype, grad, block),
    )


#: name -> specs, sizes of the layers, dtype that FSDP2 computes in
CASES = {
    "tensorwise": (specs("f8e4m3", TENSOR, TENSOR, "f8e5m2"), (70, 96, 33, 5), None),
    "tensorwise-bf16": (specs("f8e4m3", TENSOR, TENSOR, "f8e5m2"), (70, 96, 34, 6), BF16),
    "int8-tensor": (specs("int8", TENSOR, TENSOR, "int8"), (70, 96, 33, 5), None),
    "squares": (specs("f8e4m3", SQUARE, SQUARE, "f8e5m2"), (70, 96, 64, 32), None),
    "rows": (specs("f8e4m3", ROW, COLUMN, "f8e5m2"), (70, 96, 34, 6), None),
}


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that all-gathers give, and the all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in str(func):
            self.gathered += args[0].numel() * args[0].element_size()
        self.reduced += func.namespace == "c10d" and "allreduce" in str(func)
        return func(*args, **(kwargs or {}))


def make_model(given: Any, sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for position, (k, n) in enumerate(pairwise(sizes)):
        # uneven shards, and with and without a bias
        linear = nn.Linear(k, n, bias=position == 1)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(gaussian(parameter.shape, seed=position) / 8)
        if given is not None:
            linear.weight = nn.Parameter(ComputeWeight(linear.weight.detach(), *given))
        layers += [linear, nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def sharded(model: nn.Sequential, dtype: torch.dtype | None) -> nn.Sequential:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(
    model: nn.Module, sizes: tuple[int, ...], share: slice, ahead: bool = False
) -> list[float]:
    """Losses of four steps on a share of the batch, averaged over the ranks."""
    x, y = gaussian((8, 3, sizes[0]), seed=8)[share], gaussian((8, 3, sizes[-1]), seed=9)[share]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(4):
        if ahead:
            precompute_scales(model.parameters())
        loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if share != slice(None):
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(float(mean))
    return losses


def near(losses: list[float], others: list[float], relative: float) -> None:
    assert losses == pytest.approx(others, rel=relative), (losses, others)


def alike(losses: list[float], others: list[float]) -> None:
    """Within the noise of low precision, where the first loss is by far the largest."""
    assert losses == pytest.approx(others, abs=1e-2 * others[0]), (losses, others)


def check(name: str, share: slice) -> None:
    given, sizes, dtype = CASES[name]
    alone = train(make_model(given, sizes), sizes, slice(None))
    dense = train(make_model(None, sizes), sizes, slice(None))
    assert alone[-1] < 0.9 * alone[0]
    assert alone != dense
    alike(train(DistributedDataParallel(make_model(given, sizes)), sizes, share), alone)
    counts, found = [], []
    codes = with_float8_all_gather(given)
    for chosen, ahead in ((given, False), (codes, False), (codes, True)):
        model = sharded(make_model(chosen, sizes), dtype)
        with GatheredBytes() as count:
            found.append(train(model, sizes, share, ahead))
        counts.append(count)
        for fqn, parameter in model.named_parameters():
            if fqn.endswith("weight"):
                assert isinstance(parameter.to_local(), ComputeWeight)
                assert type(parameter.to_local().memory) is Tensor
    alike(found[0], alone)
    # the same casts of the same values: only the order of sums may differ
    near(found[1], found[0], 1e-2 if dtype == BF16 else 1e-5)
    near(found[2], found[1], 1e-6)
    ratio = counts[1].gathered / counts[0].gathered
    reduced = [count.reduced for count in counts]
    sys.stdout.write(f"{name}: {ratio:.3f} of the bytes, {reduced} all-reduces; {found}\n")
    # in float32 a quarter of the bytes; row scales and biases come with the codes
    assert ratio <= (0.55 if dtype == BF16 else 0.31)
    if name.startswith("tensorwise"):
        # three weights, forward and backward, in four steps; or one a step for all of them
        assert [reduced[1] - reduced[0], reduced[2] - reduced[0]] == [24, 4]


def check_refusals() -> None:
    given, _, _ = CASES["squares"]
    model = sharded(make_model(with_float8_all_gather(given), (70, 33, 5)), None)
    with pytest.raises(UnsupportedOp, match="17 rows of 33"):
        model(torch.ones(2, 70))
    given, sizes, _ = CASES["tensorwise"]
    model = sharded(make_model(with_float8_all_gather(given), sizes), None)
    with torch.no_grad():
        local = model[0].weight.to_local()
        local.memory[0, 0] = torch.nan if dist.get_rank() == 0 else 1.0
    assert model(torch.ones(2, 70)).isnan().all()


def check_changes() -> None:
    """Layers that are put back to high precision while training goes on."""
    given, sizes, _ = CASES["tensorwise"]
    x = gaussian((2, 70), seed=8)
    for codes in (False, True):
        model = sharded(make_model(with_float8_all_gather(given) if codes else given, sizes), None)
        assert not torch.equal(model(x), make_model(None, sizes)(x))
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight._local_tensor.matmuls = Matmuls()
        if codes:
            with pytest.raises(UnsupportedOp, match="FSDP2 keeps the buffers"):
                model(x)
        else:
            torch.testing.assert_close(model(x), make_model(None, sizes)(x))


def check_stale() -> None:
    """A scale that was found before the weight grew."""
    given, sizes, _ = CASES["tensorwise"]
    model = sharded(make_model(with_float8_all_gather(given), sizes), None)
    precompute_scales(model.parameters())
    model(torch.ones(2, 70))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="precompute after every change"):
        model(torch.ones(2, 70))


def check_tied() -> None:
    given, _, _ = CASES["tensorwise"]
    ids = torch.arange(6).reshape(2, 3)

    def tied(chosen: Any) -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(33, 70), nn.Linear(70, 33, bias=False))
        weight = ComputeWeight(gaussian((33, 70), seed=3), *chosen)
        model[0].weight = model[1].weight = nn.Parameter(weight)
        return model

    whole, shards = tied(given), fully_shard(tied(given))
    assert torch.equal(shards(ids), whole(ids))
    for model in (whole, shards):
        model(ids).square().mean().backward()
    grad = shards[0].weight.grad.full_tensor()
    torch.testing.assert_close(grad, whole[0].weight.grad)
    with pytest.raises(UnsupportedOp, match="lookup"):
        fully_shard(tied(with_float8_all_gather(given)))(ids)


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])) as rank:
        size = 8 // dist.get_world_size()
        for name in sys.argv[2:]:
            check(name, slice(rank * size, rank * size + size))
        check_refusals()
        check_changes()
        check_tied()
        check_stale()
        sys.stdout.write("refusals and tied weights\n")

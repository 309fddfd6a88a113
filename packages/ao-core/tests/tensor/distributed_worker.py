"""One rank of test_distributed.py: FSDP2 (values, gradients, sharded state dict) and tensor parallelism."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ao_core import WHOLE, ComputeWeight, QTensor, Spec, quantize_tensor
from ao_core.tensor import repack
from ao_core.testing.programs import one_of_the_ranks
from ao_core.testing.samples import quantized

ROW = (1, WHOLE)
SPECS = {
    "int8-row": Spec("int8", ROW),
    "int8-tensor": Spec("int8", (WHOLE, WHOLE)),
    "int4-group": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "uint4-zero": Spec("uint4", (1, 32), "bfloat16", "int", "packed"),
    "f8-row": Spec("f8e4m3", ROW),
    "nf4-double": Spec("nf4", (1, 16), Spec("int8", (1, WHOLE)), layout="packed"),
    "mx": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
    "int8-static": Spec("int8", ROW, act=Spec("int8", (WHOLE, WHOLE), static=True)),
    "int4-bf16-repacked": Spec("int4", (1, 32), "bfloat16", layout="packed"),
}


def make_model(name: str) -> nn.Module:
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    generator = torch.Generator().manual_seed(7)
    # 96 rows divide by 2, 33 do not: the second layer has uneven shards
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 33)).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    for linear in (model[0], model[2]):
        dense = linear.weight.detach()
        if name == "compute":
            row = Spec("f8e4m3", ROW)
            both = replace(row, act=row)
            linear.weight = nn.Parameter(ComputeWeight(dense, both, both, both))
            continue
        weight = quantized(dense, SPECS[name])
        weight = repack(weight) if "repacked" in name else weight
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return model


def check(name: str, folder: Path) -> None:
    model = make_model(name)
    whole = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 5 * 64).reshape(5, 64).to(model[0].bias.dtype)
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if "bf16" in name else {"rtol": 1e-5, "atol": 1e-6}
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    expected = whole(x)
    for _ in range(2):
        torch.testing.assert_close(model(x), expected, **tolerance)
    shard, one = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(shard).sum().backward()
    whole(one).sum().backward()
    torch.testing.assert_close(shard.grad, one.grad, **tolerance)
    kind = ComputeWeight if name == "compute" else QTensor
    for fqn, rows in (("0.weight", (48, 48)), ("2.weight", (17, 16))):
        local = model.state_dict()[fqn].to_local()
        assert isinstance(local, kind), type(local)
        assert local.shape[0] == rows[dist.get_rank()], local.shape
    if name != "compute":
        # what a rank holds is half of the codes, and they are the same codes
        full = whole[0].weight.canonical()
        half = full.narrow(0, 48 * dist.get_rank(), 48)
        assert torch.equal(model.state_dict()["0.weight"].to_local().canonical(), half)
    check_sharded_state(name, model, folder / name)


def check_sharded_state(name: str, model: nn.Module, folder: Path) -> None:
    """Each rank saves its shard; a model with other values loads it and gives the same outputs."""
    torch.save(model.state_dict(), f"{folder}-{dist.get_rank()}.pt")
    state = torch.load(f"{folder}-{dist.get_rank()}.pt", weights_only=True)
    x = torch.linspace(-2, 2, 3 * 64).reshape(3, 64).to(model[0].bias.dtype)
    before = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            (local.qdata.view(torch.uint8) if isinstance(local, QTensor) else local).zero_()
    assert not torch.equal(model(x), before)
    model.load_state_dict(state)
    assert torch.equal(model(x), before)


def check_tensor_parallel() -> None:
    """Columns then rows split over the ranks; the pieces come from rank 0."""
    model = make_model("int4-group")
    model[2] = nn.Linear(96, 32)
    model[2].weight = nn.Parameter(
        quantize_tensor(model[2].weight.detach(), Spec("int4", (1, 16), layout="packed")),
        requires_grad=False,
    )
    for parameter in model.state_dict().values():
        parts = (
            [leaf for _, leaf in parameter.leaves()]
            if isinstance(parameter, QTensor)
            else [parameter]
        )
        for part in parts:
            dist.broadcast(part, 0)
    whole = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 5 * 64).reshape(5, 64)
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight.to_local().shape == (48, 64)
    assert model[2].weight.to_local().shape == (32, 48)
    torch.testing.assert_close(model(x), whole(x), rtol=1e-5, atol=1e-5)
    replica = distribute_tensor(whole[0].weight, mesh, [Replicate()])
    assert torch.equal(replica.to_local(), whole[0].weight)


def main(folder: Path, names: list[str]) -> None:
    with one_of_the_ranks(folder):
        if names == ["tensor-parallel"]:
            check_tensor_parallel()
            sys.stdout.write("tensor-parallel: ok\n")
            names = []
        for name in names:
            check(name, folder)
            sys.stdout.write(f"{name}: ok\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

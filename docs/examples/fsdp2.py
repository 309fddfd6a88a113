"""Two processes share a quantized model: each holds half of the rows of every weight."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ao_core import QTensor, quantize_


def worker(rank: int, ranks: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 33))
    quantize_(model, "int4_weight_only/g32-asymmetric")  # first quantize, then shard
    x = torch.randn(4, 64, requires_grad=True)
    expected = model(x)

    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    y = model(x)
    y.sum().backward()

    torch.testing.assert_close(y, expected)
    local = model.state_dict()["0.weight"].to_local()
    assert isinstance(local, QTensor)
    assert x.grad is not None
    if rank == 0:
        print(f"rank 0 holds {tuple(local.shape)} of {tuple(model[0].weight.shape)}")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (2, f"{folder}/rendezvous"), nprocs=2)

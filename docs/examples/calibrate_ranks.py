"""Two processes calibrate one model: each runs half of the batches and solves for half of the weights."""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from ao_core import quantize_
from ao_core.ext.calibration import over_ranks
from ao_quant import GPTQConfig, Int4WeightOnlyConfig


def worker(rank: int, ranks: int, rendezvous: str) -> None:
    # torchrun sets what init_process_group("gloo") needs; here it is a file
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    batches = [torch.randn(50, 64) for _ in range(6)]  # the same on all ranks
    config = GPTQConfig(Int4WeightOnlyConfig(32))

    alone, together = copy.deepcopy(dense), copy.deepcopy(dense)
    quantize_(alone, config, data=batches)
    report = quantize_(together, config, data=over_ranks(batches))

    x = torch.randn(8, 64)
    torch.testing.assert_close(together(x), alone(x), rtol=1e-5, atol=1e-5)
    if rank == 0:
        print(
            f"{len(over_ranks(batches))} batches on this rank, {report.records[0].rows} rows in all"
        )
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (2, f"{folder}/rendezvous"), nprocs=2)

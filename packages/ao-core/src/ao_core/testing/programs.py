"""Ways of running a model that take several steps to set up: AOTInductor, and groups of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["aot_inductor", "mesh_of_one", "one_of_the_ranks", "run_ranks"]


def aot_inductor(model: nn.Module, inputs: tuple[Any, ...], folder: Path) -> Callable[..., Any]:
    """The model exported, compiled by AOTInductor into a package in `folder`, and loaded from it."""
    program = torch.export.export(model, inputs)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    return torch._inductor.aoti_load_package(path)


@contextmanager
def mesh_of_one(folder: Path) -> Iterator[DeviceMesh]:
    """Within this context this process is a process group by itself, which meets in `folder`."""
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def run_ranks(script: Path, ranks: int, folder: Path, *arguments: str, timeout: float = 300) -> str:
    """Run `script` in so many processes, which meet in `folder`; what the first one printed.

    Each gets `folder` and `arguments` on its command line, and calls `one_of_the_ranks`. When one
    fails, or `timeout` seconds are over, the others are stopped.

    Raises:
        AssertionError: a process did not succeed; with what all of them printed.
    """
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), str(folder), *arguments],
                    env={**os.environ, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + timeout
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if any(p.returncode for p in processes):
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    outputs = [log.read_text(encoding="utf-8") for log in logs]
    if any(process.returncode for process in processes):
        raise AssertionError("\n".join(outputs))
    return outputs[0]


@contextmanager
def one_of_the_ranks(folder: Path) -> Iterator[int]:
    """Within this context the process is one of those that `run_ranks` started; it ends with it."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=ranks)
    failed = True
    try:
        yield rank
        dist.barrier()
        dist.destroy_process_group()
        failed = False
    except BaseException:
        traceback.print_exc()
    # gloo's threads may abort an interpreter that shuts down in its own time, or keep it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(failed))

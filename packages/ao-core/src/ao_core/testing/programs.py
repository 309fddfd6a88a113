"""Ways of running a model that take several steps to set up: AOTInductor, and groups of processes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ao_core.registry import registry
from ao_core.testing.warm import run_python

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

    It gets `folder` and `arguments` on its command line, and calls `one_of_the_ranks`, where it is
    forked. When one process fails, or `timeout` seconds are over, the others are stopped.

    Raises:
        AssertionError: a process did not succeed; with what all of them printed.
    """
    environment = {**os.environ, "WORLD_SIZE": str(ranks)}
    done = run_python(script, folder, *arguments, env=environment, timeout=timeout)
    outputs = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("rank*.log"))]
    if done.returncode:
        raise AssertionError("\n".join([done.stderr, *outputs]))
    return outputs[0]


@contextmanager
def one_of_the_ranks(folder: Path) -> Iterator[int]:
    """Within this context the process is one of those that `run_ranks` runs; it ends with it."""
    torch.set_num_threads(1)
    registry.load_plugins()  # once, not in each
    ranks = int(os.environ["WORLD_SIZE"])
    rank = _fork(ranks, folder)
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


def _fork(ranks: int, folder: Path) -> int:
    """Become so many processes; the rank of each. The first process waits for them, and ends."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["RANK"] = str(rank)
            return rank
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            os._exit(1)
    os._exit(0)

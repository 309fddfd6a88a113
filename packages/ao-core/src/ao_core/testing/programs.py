"""Ways of running a model that take several steps to set up: AOTInductor, and a group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["aot_inductor", "mesh_of_one"]


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

"""Whether this machine can run the Triton kernels, and what the launches of them share.

What is asked of a device at every launch is asked of torch once: which takes microseconds. Devices of
tensors have an index, so they are always the same one.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ao_core.ext.kernels import lacks_capability

__all__ = [
    "CAPABILITY",
    "capability",
    "capturing",
    "current_device",
    "on_device",
    "shared_memory",
    "sm_count",
    "supports_pdl",
    "unavailable",
    "unavailable_float8",
]

#: the oldest devices that have what the kernels are written with: bfloat16, asynchronous copies
CAPABILITY = (8, 0)


def unavailable() -> str | None:
    """None, or a sentence that says why the Triton kernels cannot run here."""
    if find_spec("triton") is None:
        return 'Triton is not installed; pip install "ao-kernels[triton]"'
    if torch.version.hip is not None:
        return "the assembly in the Triton kernels is that of NVIDIA's devices"
    return lacks_capability(CAPABILITY)


def unavailable_float8() -> str | None:
    """`unavailable`, for kernels that convert to float8."""
    return unavailable() or lacks_capability((8, 9))


def on_device(x: Tensor) -> Any:
    """A context for launches on the device of `x`: Triton launches on the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a device without one, that of an H100."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured: what is allocated then is the graph's, and nothing can be copied."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def current_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@lru_cache
def sm_count(device: torch.device) -> int:
    """The number of SMs; without a CUDA device that of an H100."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory per CTA; without a CUDA device those of an H100."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    found: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return found


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one in front of it has ended, also in a CUDA graph.

    Programmatic dependent launch: sm_90, and for graphs a driver for CUDA 12.3.
    """
    if device.type != "cuda" or capability(device) < (9, 0):
        return False
    driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return driver >= 12030

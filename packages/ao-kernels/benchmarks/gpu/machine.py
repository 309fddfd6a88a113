"""The machine: what it copies and multiplies at most, its clocks, and the versions on it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch
from measuring import Contender, recorded, told
from torch import Tensor

PACKAGES = (
    *("torch", "triton", "ao-core", "ao-quant", "ao-kernels", "ao-optim", "ao-sparsity"),
    *("torchao", "bitsandbytes", "gemlite", "marlin"),
)
#: what nvidia-smi is asked
ASKED = (
    *("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm"),
    *("power.draw", "power.limit", "temperature.gpu"),
)
#: bytes that are copied, and rows, columns and depth of the matmuls that show the peaks
COPIED, SIDE = int(1e9), 8192


def copy_bandwidth(device: str, size: int = COPIED) -> float:
    """Bytes read and written per second by `copy_`."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = typical(source, torch.empty_like(source), lambda x, to: to.copy_(x))
    return 2 * size / seconds


def peaks(device: str, side: int = SIDE) -> dict[str, float | str]:
    """Operations per second of torch's dense matmuls, or why there are none."""
    one = torch.ones((), device=device)

    def codes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = (torch.randn(side, side, device=device) for _ in range(2))
        scale = 20 if dtype == torch.int8 else 1
        return (a * scale).to(dtype), (b * scale).to(dtype)

    def float8(a: Tensor, b: Tensor) -> Tensor:
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, **options)

    matmuls: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor]]] = {
        "bf16": (torch.bfloat16, lambda a, b: a @ b.t()),
        "float8": (torch.float8_e4m3fn, float8),
        "int8": (torch.int8, lambda a, b: torch._int_mm(a, b.t())),
    }
    found: dict[str, float | str] = {}
    for name, (dtype, multiply) in matmuls.items():
        try:
            found[name] = 2 * side**3 / typical(*codes(dtype), multiply)
        except Exception as error:  # of a device that has none
            found[name] = told(error)
    return found


def typical(a: Tensor, b: Tensor, call: Callable[[Tensor, Tensor], Any]) -> float:
    """Median of seconds."""
    run = recorded(Contender([b], call), a)
    return median(run() for _ in range(20))


def clocks() -> dict[str, str]:
    """What nvidia-smi says now."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    values = done.stdout.strip().partition("\n")[0].split(", ")
    return dict(zip(ASKED, values, strict=False))


def environment(device: str) -> dict[str, Any]:
    """Device, and versions."""
    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else [],
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else 0,
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

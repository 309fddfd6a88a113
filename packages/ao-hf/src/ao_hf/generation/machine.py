"""The machine that figures were measured on: its name, versions, memory, and how fast it reads."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import ao_hf

__all__ = ["PeakMemory", "about", "free_memory", "read_rate", "synchronize"]

_PACKAGES = ("torch", "transformers", "ao-core", "ao-quant", "ao-kernels", "ao-hf")
#: bytes that are read for the read rate: more than caches of processors hold
_READ = 256 << 20


def about(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Date, machine, versions, and the commit where ao runs from a checkout of git."""
    place, found = torch.device(device), {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _processor()
        if place.type == "cpu"
        else torch.get_device_module(place).get_device_name(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": found,
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """Of the checkout that this file is tracked in."""
    source = Path(ao_hf.__file__)
    try:
        for command in (["ls-files", "--error-unmatch", source.name], ["rev-parse", "HEAD"]):
            done = subprocess.run(
                ["git", "-C", str(source.parent), *command],
                capture_output=True,
                text=True,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def read_rate(device: torch.device | str = "cpu") -> float:
    """Bytes per second at which torch reads memory here: those of a large matrix times a vector, once."""
    place = torch.device(device)
    matrix = torch.ones(4096, _READ // 4096 // 4, device=place)
    vector = torch.ones(matrix.shape[1], device=place)
    torch.mv(matrix, vector)
    synchronize(place)
    start = time.perf_counter()
    torch.mv(matrix, vector)
    synchronize(place)
    return matrix.nbytes / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that a model can take there now; of a CPU those that the system says are available."""
    place = torch.device(device)
    if place.type != "cpu":
        return int(torch.get_device_module(place).mem_get_info()[0])
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return 1024 * int(text.partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class PeakMemory:
    """The most memory since it was made.

    Linux tells the peak of a process since a moment; other systems that since the process began.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats()

    def bytes(self) -> int:
        """On the device; of a CPU those of the process."""
        allocated = self.allocated()
        return self.resident() if allocated is None else allocated

    def allocated(self) -> int | None:
        """Bytes that torch had on the device; None on a CPU, where it does not count."""
        if self.device.type == "cpu":
            return None
        return int(torch.get_device_module(self.device).max_memory_allocated())

    def resident(self) -> int:
        """Bytes of the process; 0 where the system does not tell."""
        try:
            text = Path("/proc/self/status").read_text(encoding="ascii")
            return 1024 * int(text.partition("VmHWM:")[2].split()[0])
        except (OSError, IndexError, ValueError):
            return _peak_of_process()


def _peak_of_process() -> int:
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""Resident memory of this process, now and at its greatest, for benchmarks and reports."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["peak", "reset_peak", "resident"]


def resident() -> int:
    """Bytes of resident memory; where /proc is missing, their peak so far."""
    return _proc("VmRSS") or peak()


def peak() -> int:
    """Greatest resident memory so far, or since `reset_peak` where there is /proc."""
    return _proc("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Let the peak begin anew, where the system can."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _proc(field: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

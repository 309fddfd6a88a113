"""Answers of known-answer tests: found once in a process, and kept on disk where they are right.

A right answer holds for a kind of device, a driver, torch, and what the kernels are made from. A wrong one is
found again by each process, since its reason may be gone by then.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ao_core.ext import cache_folder
from ao_kernels.triton.shared.device import capturing

__all__ = ["asked", "wrong"]

_guard = threading.Lock()
#: what was found in this process
_found: dict[tuple[str, str, torch.device], str | None] = {}


def asked(
    family: str,
    kind: str,
    device: torch.device,
    made_from: Callable[[], tuple[str, ...]],
    answer: Callable[[], str | None],
) -> str | None:
    """None where kernels were right about a kind of calls on a device, or the sentence that says otherwise.

    Nothing can be waited for while a CUDA graph is captured, so nothing is tried then: a warm-up has asked.

    Args:
        family: "triton" or "cuda"; the folder of the cache.
        kind: all that the kernels are compiled for, as text.
        device: a CUDA device.
        made_from: versions and digests of what the kernels are made from.
        answer: runs the test; None where its answer was right.
    """
    key = family, kind, device
    if key not in _found:
        if capturing(device):
            return None
        with _guard:
            if key not in _found:
                _found[key] = _kept_or_answered(family, kind, device, made_from(), answer)
    return _found[key]


def wrong() -> dict[str, str]:
    """Kinds of calls that kernels were wrong about in this process, and what was said."""
    return {
        f"{family} {kind} on {device}": reason
        for (family, kind, device), reason in _found.items()
        if reason is not None
    }


def _kept_or_answered(
    family: str,
    kind: str,
    device: torch.device,
    made_from: tuple[str, ...],
    answer: Callable[[], str | None],
) -> str | None:
    file = _folder(family, device, made_from) / hashlib.sha256(kind.encode()).hexdigest()[:32]
    if file.exists():
        return None
    found = answer()
    if found is None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(kind + "\n", encoding="utf-8")
        except OSError:  # it is found again by the next process
            pass
    return found


def _folder(family: str, device: torch.device, made_from: tuple[str, ...]) -> Path:
    """Where right answers are kept: for a kind of device, a driver, torch, and what kernels are made from."""
    properties = torch.cuda.get_device_properties(device)
    driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    about = (
        properties.name,
        properties.major,
        properties.minor,
        driver,
        torch.__version__,
        made_from,
    )
    return cache_folder(family) / hashlib.sha256(repr(about).encode()).hexdigest()[:32]

"""The C++ library: where it is, whether it can serve, and loading it once."""

from __future__ import annotations

import os
import threading
from importlib import import_module
from pathlib import Path

import torch

__all__ = ["isa", "library_path", "load", "unavailable", "usable_isas", "want_alone"]

_OLDEST_TORCH = (2, 11)
_lock = threading.Lock()
#: the outcome of the first attempt: None while there was none, then (reason,)
_outcome: tuple[str | None] | None = None


def library_path() -> Path:
    """The file of the library: AO_CPU_LIBRARY (another build, for tests), or the installed one."""
    chosen = os.environ.get("AO_CPU_LIBRARY")
    return Path(chosen) if chosen else Path(__file__).with_name("libao_cpu.so")


def unavailable() -> str | None:
    """None where the library is loaded (now or before), or a sentence that says why it cannot be."""
    global _outcome
    if _outcome is None:
        with _lock:
            if _outcome is None:
                _outcome = (_load(),)
    return _outcome[0]


def load() -> None:
    """Load the library, if that has not happened.

    Raises:
        RuntimeError: it cannot be loaded; the message says why.
    """
    if reason := unavailable():
        raise RuntimeError(reason)


def isa() -> str:
    """The instruction set that the kernels use.

    On x86 "generic", "avx2", "avx2_vnni", "avx512_vnni", "avx512" or "amx", on ARM "generic", "neon",
    "neon_dotprod" or "neon_i8mm".

    Raises:
        RuntimeError: the library cannot be loaded.
    """
    load()
    name: str = torch.ops.ao_kernels.cpu_isa()
    return name


def usable_isas() -> list[str]:
    """The instruction sets that this processor has, the best one first; AO_CPU_ISA chooses among them.

    Raises:
        RuntimeError: the library cannot be loaded.
    """
    load()
    names: str = torch.ops.ao_kernels.usable_cpu_isas()
    return names.split(", ")


def want_alone(change: int) -> None:
    """Begin (1) or end (-1) the batch-invariant mode of the kernels: see `Kernel.alone`."""
    torch.ops.ao_kernels.want_batch_invariant(change)


def _load() -> str | None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        return f"the CPU kernels of ao-kernels need torch >= 2.11, found {torch.__version__}"
    path = library_path()
    if not path.exists():
        return _why_missing(path)
    try:
        torch.ops.load_library(path)
        torch.ops.ao_kernels.cpu_isa()
        import_module("ao_kernels.cpu.fakes")  # which only ops that exist can have
    except Exception as error:
        return f"the CPU kernels of ao-kernels cannot be used: {error}"
    return None


def _why_missing(path: Path) -> str:
    note = path.with_name("not_built.txt")
    if not note.exists():
        return f"the CPU kernels of ao-kernels are missing: there is no file {path}"
    reason = note.read_text(encoding="utf-8").strip()
    return (
        f"ao-kernels was installed without its CPU kernels, because {reason}; "
        "when that has changed, install it again with --no-deps --force-reinstall --no-cache-dir"
    )

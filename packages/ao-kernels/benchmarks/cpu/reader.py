"""The machine's read rate: a few lines of C, compiled for it, in torch's own threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from functools import partial
from pathlib import Path

import torch
from rotation import Contender

from workspace import ROOT

READER = "reader"
SOURCE = Path(__file__).with_name("reader.c")
#: several times the last cache
SIZE = 192 << 20


def reader(size: int = SIZE) -> Contender:
    """Read so many bytes of random memory once, with as many threads as torch uses."""
    library = ctypes.CDLL(str(compiled()))
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.read_all.restype = ctypes.c_uint64
    data = torch.randint(-(2**63), 2**63 - 1, (size // 8 + 8,))
    first = -data.data_ptr() % 64 // 8  # lines begin at multiples of 64 bytes
    aligned = data[first : first + size // 8]

    def read(memory: torch.Tensor) -> int:
        return library.read_all(memory.data_ptr(), size, torch.get_num_threads())

    return Contender(READER, size, torch.uint8, lambda m: [partial(read, aligned)])


def compiled() -> Path:
    """The shared library of reader.c, built once for each text of it."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = ROOT / "build" / "bench" / f"reader-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        # OpenMP, as torch and its peers use it: one pool of threads, so that nobody's idle threads
        # spin on the cores of another
        command = ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", new, SOURCE]
        subprocess.run(command, check=True)
        new.rename(library)
    return library

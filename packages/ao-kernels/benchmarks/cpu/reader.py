"""The machine's read rate: a few lines of C, compiled for it, in torch's own threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from rotation import Contender

from workspace import ROOT

READER = "reader"
SOURCE = Path(__file__).with_name("reader.c")
#: bytes that are read at a time
SIZE = 192 << 20
#: all memory that is read in turns, in last-level caches
CACHES = 3
#: bytes of a cache line
LINE = 64
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def last_cache() -> int:
    """Bytes of the last-level cache, or 0 where the system does not say."""
    text = _LAST_CACHE.read_text(encoding="utf-8").strip() if _LAST_CACHE.exists() else "0K"
    return int(text.removesuffix("K")) << 10


def reader(size: int = SIZE, pieces: int | None = None) -> Contender:
    """Read so many bytes, with as many threads as torch uses.

    Args:
        size: bytes of a call.
        pieces: of memory that calls take turns on. None: as many as the last-level cache cannot hold, so that
            each call reads what is in no cache, as a weight is when its turn comes.
    """
    count = max(1, -(-CACHES * last_cache() // size)) if pieces is None else pieces
    numbers = torch.arange(count * size // 8)  # no two pages are equal
    return _reading(READER, numbers.chunk(count))


def reader_of(contender: Contender) -> Contender:
    """Read the memory of another contender's copies: as far from the processor, and in pieces as long.

    It is half a turn ahead, so that neither finds in a cache what the other has just read.
    """
    half = len(contender.memory) // 2
    memory = [*contender.memory[half:], *contender.memory[:half]]
    return _reading(f"{READER} of {contender.name}", memory)


def _reading(name: str, memory: Sequence[torch.Tensor]) -> Contender:
    """Read one of some tensors of the same size; of the first and the last cache line, only whole ones."""
    size, read_all = memory[0].nbytes // LINE * LINE - LINE, _read_all()

    def read(tensor: torch.Tensor) -> int:
        return read_all(-(-tensor.data_ptr() // LINE) * LINE, size, torch.get_num_threads())

    return Contender(name, size, torch.uint8, lambda m: [partial(read, part) for part in memory])


@cache
def _read_all() -> Callable[[int, int, int], int]:
    """The function of reader.c: address, bytes and threads."""
    function = ctypes.CDLL(str(compiled())).read_all
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_uint64
    return function  # type: ignore[no-any-return]


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

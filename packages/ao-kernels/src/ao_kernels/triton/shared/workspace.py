"""Workspaces of launches: partial sums and semaphores of split-K; activations as matrices.

Nothing that is made during a launch is kept beyond it: a CUDA graph, or the warm-up of `torch.compile` with
`mode="reduce-overhead"`, would take the memory back. Semaphores are made with a
weight's layout.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ao_kernels.triton.shared.device import capturing

__all__ = [
    "COUNTER_ALIGNMENT",
    "SEMAPHORES",
    "prepare",
    "rows_of",
    "split_k_workspace",
    "take_semaphores",
]

#: semaphores of one device; a launch with split-K takes one per output tile
SEMAPHORES = 1 << 20
#: semaphores of a launch begin at multiples of so many: 128 bytes
COUNTER_ALIGNMENT = 32
_guard = threading.Lock()
_pools: dict[torch.device, _Pool] = {}


class _Pool:
    """The semaphores of one device: which are taken, and by which stream."""

    def __init__(self, device: torch.device) -> None:
        self.semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams see the zeros too
        self.used = 0
        self.of_streams: dict[int, Tensor] = {}

    def take(self, count: int) -> Tensor | None:
        """Semaphores that nobody else has; None where too few are left."""
        if self.used + count > SEMAPHORES:
            return None
        self.used += count
        return self.semaphores[self.used - count : self.used]

    def of_stream(self, stream: int, count: int) -> Tensor | None:
        """Semaphores that only this stream has."""
        mine = self.of_streams.get(stream)
        if mine is None or len(mine) < count:
            mine = self.take(count)
            if mine is not None:
                self.of_streams[stream] = mine
        return mine


def prepare(device: torch.device, *, renew: bool = False) -> None:
    """Make the semaphores of a device, once; `renew`: anew, where no graph uses the old ones any more.

    Never in a launch. Without them a launch is right too, and fills its own with zeros.
    """
    with _guard:
        if renew or device not in _pools:
            _pools[device] = _Pool(device)


def take_semaphores(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 semaphores: zeros that a launch counts with and leaves as zeros.

    Launches of one stream follow each other and share them. A CUDA graph may run beside anything, so
    each launch in it has its own.
    """
    count = -(-count // COUNTER_ALIGNMENT) * COUNTER_ALIGNMENT
    pool, mine = _pools.get(device), None
    if pool is not None:
        captured = capturing(device)
        with _guard:
            if captured:
                mine = pool.take(count)
            else:
                cuda = device.type == "cuda"
                stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
                mine = pool.of_stream(stream, count)
    return torch.zeros(count, dtype=torch.int32, device=device) if mine is None else mine


def split_k_workspace(
    out: Tensor, output_tiles: int, splits: int, size: int
) -> tuple[Tensor, Tensor]:
    """Partial sums, float32 (output_tiles, splits, size), and one semaphore per output tile.

    A matmul without splits does not touch them: any tensor can stand there.
    """
    if splits == 1:
        return out, out
    partial = out.new_empty(output_tiles * splits * size, dtype=torch.float32)
    return partial, take_semaphores(output_tiles, out.device)


def rows_of(x: Tensor, k: int) -> Tensor:
    """Activations (…, k) as a matrix whose rows are contiguous, and which begins at a multiple of 16 bytes.

    So no launch is compiled anew for where its activations happen to begin.
    """
    x_MK = x.reshape(-1, k)
    if x_MK.stride(-1) != 1:
        return x_MK.contiguous()
    return x_MK if x_MK.data_ptr() % 16 == 0 else x_MK.clone()

"""Workspaces of launches: partial sums and semaphores of split-K; activations as matrices."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["rows_of", "split_k_workspace", "take_semaphores"]

#: semaphores of one device; a launch with split-K takes one per output tile
_SEMAPHORES = 1 << 18
_guard = threading.Lock()
_pools: dict[torch.device, _Pool] = {}


class _Pool:
    """The semaphores of one device: which are taken, and by which stream."""

    def __init__(self, device: torch.device) -> None:
        self.semaphores = torch.zeros(_SEMAPHORES, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # other streams see the zeros too
        self.used = 0
        self.of_streams: dict[int, Tensor] = {}

    def take(self, count: int) -> Tensor:
        """Semaphores that nobody else has; new ones where too few are left."""
        if self.used + count > _SEMAPHORES:
            return torch.zeros(count, dtype=torch.int32, device=self.semaphores.device)
        self.used += count
        return self.semaphores[self.used - count : self.used]

    def of_stream(self, stream: int, count: int) -> Tensor:
        """Semaphores that only this stream has."""
        mine = self.of_streams.get(stream)
        if mine is None or len(mine) < count:
            mine = self.of_streams[stream] = self.take(count)
        return mine


def take_semaphores(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 semaphores: zeros that a launch counts with and leaves as zeros.

    Launches of one stream follow each other and share them. A CUDA graph may run beside anything, so
    each launch in it has its own.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    with _guard:
        pool = _pools.get(device)
        if pool is None:
            if capturing:  # memory taken now would be the graph's
                return torch.zeros(count, dtype=torch.int32, device=device)
            pool = _pools[device] = _Pool(device)
        if capturing:
            return pool.take(count)
        return pool.of_stream(torch.cuda.current_stream(device).cuda_stream, count)


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
    """Activations (…, k) as a matrix whose rows are contiguous."""
    x_MK = x.reshape(-1, k)
    return x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()

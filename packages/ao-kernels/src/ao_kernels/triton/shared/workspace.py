"""What launches share: activations as matrices, partial sums, and counters of split-K."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["rows_of", "scratch", "take_locks"]

#: counters of one device; a launch takes some for a block of its result each
_LOCKS = 1 << 18
_guard = threading.Lock()
_pools: dict[torch.device, _Pool] = {}


class _Pool:
    """The counters of one device: which are taken, and by which stream."""

    def __init__(self, device: torch.device) -> None:
        self.locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # other streams see the zeros too
        self.used = 0
        self.of_streams: dict[int, Tensor] = {}

    def take(self, count: int) -> Tensor:
        """Counters that nobody else has; where too few are left, new ones."""
        if self.used + count > _LOCKS:
            return torch.zeros(count, dtype=torch.int32, device=self.locks.device)
        self.used += count
        return self.locks[self.used - count : self.used]

    def of_stream(self, stream: int, count: int) -> Tensor:
        """Counters that only this stream has."""
        mine = self.of_streams.get(stream)
        if mine is None or len(mine) < count:
            mine = self.of_streams[stream] = self.take(count)
        return mine


def take_locks(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 zeros that a launch counts with and leaves as zeros.

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


def scratch(out: Tensor, places: int, splits: int, size: int) -> tuple[Tensor, Tensor]:
    """For each of `places` what its `splits` blocks share: float32 for the `size` sums of each, a counter.

    A product without splits does not touch it: any tensor can stand there.
    """
    if splits == 1:
        return out, out
    partial = out.new_empty(places * splits * size, dtype=torch.float32)
    return partial, take_locks(places, out.device)


def rows_of(x: Tensor, k: int) -> Tensor:
    """Activations (…, k) as a matrix whose rows lie in one piece each."""
    x_MK = x.reshape(-1, k)
    return x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()

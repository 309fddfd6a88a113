"""The tail of a cache of keys and values: the call type of the op "write_tail", and what calls it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.spec import Spec

__all__ = ["WriteTailCall", "write_tail"]


@dataclass(frozen=True)
class WriteTailCall:
    """A call of the op "write_tail"; an `OpCall`."""

    #: of all keys and values
    dtype: torch.dtype
    device: str
    op: str = "write_tail"
    layout: str = "plain"

    @property
    def specs(self) -> tuple[Spec, ...]:
        """None: nothing is quantized."""
        return ()


_call = lru_cache(maxsize=64)(WriteTailCall)


def write_tail(
    counts: Tensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: int,
    coded: int,
) -> None:
    """Write the last T tokens of a cache into its tail, and how many tokens there are.

    What `ao_core.ext.attend` reads: token p is in slot p % R. Those of the T tokens that are quantized
    already are left out. Shapes and dtypes are the caller's to check.

    Args:
        counts: int64 (2,), set to `tokens` and `coded`.
        tail_key: (B, Hkv, R, D), contiguous.
        tail_value: (B, Hkv, R, Dv), likewise.
        key: (B, Hkv, T, D), tokens `tokens` − T to `tokens` − 1.
        value: (B, Hkv, T, Dv), likewise.
        tokens: how many tokens there are then.
        coded: how many of them, the first ones, are quantized; not more than R are not.
    """
    call = _call(key.dtype, key.device.type)
    run(call, counts, tail_key, tail_value, key, value, tokens, coded)

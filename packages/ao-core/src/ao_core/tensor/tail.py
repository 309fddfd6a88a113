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
    coded: int = 0,
) -> None:
    """Write the next T tokens of a cache into its tail, and how many tokens there are then.

    What `ao_core.ext.attend` reads: token p is in slot p % R. Those of the T tokens that are quantized
    already are left out. Shapes and dtypes are the caller's to check.

    Args:
        counts: int64 (2,): how many tokens there are, and how many of them are quantized; both are updated.
        tail_key: (B, Hkv, R, D), contiguous.
        tail_value: (B, Hkv, R, Dv), likewise.
        key: (B, Hkv, T, D), the tokens from `counts[0]` on.
        value: (B, Hkv, T, Dv), likewise.
        coded: how many tokens, the first ones, are quantized now, if that is more than before; not more
            than R are not.
    """
    call = _call(key.dtype, key.device.type)
    run(call, counts, tail_key, tail_value, key, value, coded)

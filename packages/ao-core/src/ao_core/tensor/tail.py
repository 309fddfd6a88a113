"""Tokens that are appended to a cache of keys and values: the ops "write_tail" and "encode_tokens"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.numerics import full_block
from ao_core.spec import Spec
from ao_core.tensor.leaves import Leaves

__all__ = ["EncodeTokensCall", "WriteTailCall", "encode_tokens", "write_tail"]


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


@dataclass(frozen=True)
class EncodeTokensCall:
    """A call of the op "encode_tokens"; an `OpCall`."""

    #: formats of keys and values
    key: Spec
    value: Spec
    #: (B, Hkv, S, D); S is for how many tokens there is memory
    key_shape: tuple[int, ...]
    #: elements of a value
    value_dim: int
    #: of all keys and values
    dtype: torch.dtype
    #: whether no token before the first one shares scales with it
    whole: bool
    device: str
    op: str = "encode_tokens"

    @property
    def layout(self) -> str:
        """That of the keys."""
        return self.key.layout

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The formats of keys and values."""
        return self.key, self.value


def encode_tokens(
    stored_key: Leaves,
    stored_value: Leaves,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    center: Tensor | None,
    tokens: int,
    begin: int,
    end: int,
) -> None:
    """Quantize tokens of a cache from their exact values: the op "encode_tokens", by the best kernel.

    The tokens from `tokens` on are the new ones, and those before are in the tail: token p in slot p % R.
    Tokens before `begin` keep their codes, and their scales where they share these. Shapes and dtypes are the
    caller's to check.

    Args:
        stored_key: (B, Hkv, S, D), whose codes and scales are written.
        stored_value: (B, Hkv, S, Dv), likewise.
        tail_key: (B, Hkv, R, D), contiguous.
        tail_value: (B, Hkv, R, Dv), likewise.
        key: (B, Hkv, T, D), the tokens from `tokens` on.
        value: (B, Hkv, T, Dv), likewise.
        center: float32 (B, Hkv, 1, D), subtracted from keys; None: nothing.
        tokens: how many tokens there are before the new ones.
        begin: the first token that is quantized.
        end: the token after the last; a multiple of the tokens that share scales.
    """
    shape, specs = stored_key.shape, (stored_key.spec, stored_value.spec)
    shared = (full_block(spec.block, shape)[2] for spec in specs)
    whole = all(begin % count == 0 for count in shared)
    call = EncodeTokensCall(*specs, shape, stored_value.shape[3], key.dtype, whole, key.device.type)
    with torch.no_grad():
        run(
            call, stored_key.tensor(), stored_value.tensor(), tail_key, tail_value, key, value, center,
            tokens, begin, end,
        )  # fmt: skip

"""Tokens are appended to a `QuantizedKV`: each block is quantized once, from exact values."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.ext import ConfigError
from ao_core.ext.kernels import encode_tokens, write_tail
from ao_quant.kv_cache.config import BLOCK
from ao_quant.kv_cache.state import QuantizedKV, coded_tokens

__all__ = ["append_", "append_now"]


def append_(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    """Write the keys and values of the next T tokens, and quantize the blocks that become due.

    Which codes a token gets does not depend on how tokens are divided among calls. A block is quantized when
    `window` tokens follow it, all at once, from exact values. Of a block that `crop_` cut through, the
    tokens before the cut keep their codes, and the others share scales with them where tokens share scales.

    Args:
        kv: the cache, whose tensors are written.
        key: (B, Hkv, T, D) in the dtype of the cache.
        value: (B, Hkv, T, Dv), likewise.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit, or there is no memory for so many tokens; the cache
            is as it was.
    """
    if torch.compiler.is_compiling():
        from ao_quant.kv_cache.traced import append_traced

        append_traced(kv, key, value)
    else:
        append_now(kv, key, value)


def append_now(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    """`append_` outside of a trace."""
    _check(kv, key, value)
    tokens, coded = kv.counts.tolist()
    total = tokens + key.shape[2]
    if total > kv.capacity:
        raise ConfigError(
            f"{key.shape[2]} tokens after {tokens} are {total}, and this cache has memory for "
            f"{kv.capacity}; make it with capacity={total} or more, or take grown(kv, {total})"
        )
    due = max(coded_tokens(total, kv.window), coded)
    if due > coded:
        if coded == 0 and kv.center is not None:
            with torch.no_grad():
                _set_center(kv, kv.center, key, tokens)
        encode_tokens(
            kv.key, kv.value, kv.tail_key, kv.tail_value, key, value, kv.center, tokens, coded, due
        )
    write_tail(kv.counts, kv.tail_key, kv.tail_value, key, value, due)


def _check(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    tokens = key.shape[2] if key.dim() == 4 else -1
    for name, x, stored in (("key", key, kv.key), ("value", value, kv.value)):
        batch, heads, _, width = stored.shape
        if x.shape != (batch, heads, tokens, width):
            raise ConfigError(
                f"{name} has the shape {tuple(x.shape)}; this cache takes ({batch}, {heads}, T, {width}): "
                f"a batch of {batch}, {heads} heads and the same T for keys and values"
            )
        if x.dtype is not kv.tail_key.dtype or x.device != kv.counts.device:
            raise ConfigError(
                f"{name} is {x.dtype} on {x.device}, and this cache is {kv.dtype} on {kv.device}; cast or "
                "move it, or make another cache"
            )


def _set_center(kv: QuantizedKV, center: Tensor, key: Tensor, tokens: int) -> None:
    """The mean of the first block of keys, of which some may be in the tail."""
    old = kv.tail_key[:, :, : min(tokens, BLOCK)]
    first = torch.cat([old, key[:, :, : BLOCK - old.shape[2]]], 2)
    center.copy_(first.float().mean(2, keepdim=True))

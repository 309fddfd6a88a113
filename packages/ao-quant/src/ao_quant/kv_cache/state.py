"""`QuantizedKV`: the keys and values of one layer, as a record of plain tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import ConfigError, attend, quantize_values, registry
from ao_core.ext.kernels import Leaves
from ao_quant.kv_cache.config import BLOCK, KVCacheConfig, kv_config

__all__ = [
    "QuantizedKV",
    "attend_to",
    "bytes_per_token",
    "coded_tokens",
    "dequantized",
    "new_kv",
    "tail_slots",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class QuantizedKV:
    """The keys and values of one layer: blocks of 128 quantized tokens, and a tail of exact ones.

    The record never changes; functions whose names end in `_` write into its tensors. All of them have
    fixed sizes and stay where they are, so compiled code and CUDA graphs can hold them, while `grown`
    makes a record with more memory and the same codes.
    """

    #: (B, Hkv, S, D) and (B, Hkv, S, Dv), quantized; S is a multiple of 128
    key: Leaves
    value: Leaves
    #: (B, Hkv, R, D) and (B, Hkv, R, Dv) in the logical dtype: token p is in slot p % R
    tail_key: Tensor
    tail_value: Tensor
    #: float32 (B, Hkv, 1, D), what is added to keys of blocks; None: nothing
    center: Tensor | None
    #: int64 (2,): how many tokens there are, and how many of them are in blocks
    counts: Tensor
    #: at least so many of the last tokens are in the tail
    window: int

    @property
    def tokens(self) -> int:
        """How many tokens there are; waits for the device."""
        return int(self.counts[0])

    @property
    def coded(self) -> int:
        """How many of them are quantized; waits for the device."""
        return int(self.counts[1])

    @property
    def capacity(self) -> int:
        """How many tokens there is memory for."""
        return self.key.shape[2] + self.window + BLOCK - 1

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.key.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The logical dtype, that of the tail."""
        return self.tail_key.dtype

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.counts.device

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors, with memory that is not in use yet."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All tensors, those that have a batch after `counts`."""
        center = [] if self.center is None else [self.center]
        tails = (self.tail_key, self.tail_value)
        return [self.counts, *tails, *center, *self.key.leaves, *self.value.leaves]

    def with_tensors(self, tensors: list[Tensor], tokens: int | None = None) -> QuantizedKV:
        """The same around other tensors, in the order of `tensors`; `tokens` is the new S."""
        counts, tail_key, tail_value, *rest = tensors
        center = None if self.center is None else rest.pop(0)
        split = len(self.key.leaves)
        key, value = (
            old.with_leaves(
                tuple(leaves), (len(tail_key), old.shape[1], tokens or old.shape[2], old.shape[3])
            )
            for old, leaves in ((self.key, rest[:split]), (self.value, rest[split:]))
        )
        return replace(
            self, key=key, value=value, tail_key=tail_key, tail_value=tail_value, center=center, counts=counts
        )  # fmt: skip


def coded_tokens(tokens: int, window: int) -> int:
    """How many of so many tokens are in blocks: whole blocks, such that `window` tokens are not."""
    return max(tokens - window, 0) // BLOCK * BLOCK


def tail_slots(window: int) -> int:
    """How many exact tokens a tail has memory for: a window in whole blocks, and the block that fills up."""
    return -(-window // BLOCK) * BLOCK + BLOCK


def new_kv(
    config: KVCacheConfig | str,
    batch: int,
    heads: int,
    head_dim: int,
    capacity: int,
    *,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> QuantizedKV:
    """An empty cache of one layer.

    Args:
        config: the formats, or a name of `KV_RECIPES`.
        batch: rows of the batch.
        heads: of keys and values.
        head_dim: elements of a key.
        capacity: how many tokens it is to hold at least; `grown` makes room for more.
        value_dim: elements of a value; None: `head_dim`.
        dtype: the logical dtype, that of keys, values and queries.
        device: where it is; None: the default device.

    Raises:
        ConfigError: a size is not positive, the dtype is not float32, bfloat16 or float16, or a format cannot
            be kept in blocks of tokens.
        UnknownNameError: there is no such recipe, number format or layout.
    """
    config = kv_config(config)
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch": batch, "heads": heads, "head_dim": head_dim, "value_dim": value_dim}
    for name, size in {**sizes, "capacity": capacity}.items():
        if size < 1:
            raise ConfigError(f"{name}={size}: use a positive number")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype}: use torch.float32, torch.bfloat16 or torch.float16")
    size = max(coded_tokens(capacity, config.window), BLOCK)
    slots = tail_slots(config.window)

    def zeros(width: int) -> Tensor:
        return torch.zeros(batch, heads, slots, width, dtype=dtype, device=device)

    key, value = (
        _empty(spec, (batch, heads, size, width), dtype, device)
        for spec, width in zip(
            config.formats(head_dim, value_dim), (head_dim, value_dim), strict=True
        )
    )
    center = torch.zeros(batch, heads, 1, head_dim, device=device) if config.center else None
    return QuantizedKV(
        key,
        value,
        zeros(head_dim),
        zeros(value_dim),
        center,
        torch.zeros(2, dtype=torch.int64, device=device),
        config.window,
    )


def _empty(
    spec: Spec, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None
) -> Leaves:
    """The memory of such a tensor, found by that of one block: no dense tensor of the shape is made."""
    batch, heads, tokens, width = shape
    probed = _probed(spec, width, device)
    leaves = tuple(
        torch.zeros(batch, heads, tokens // BLOCK * rows, *rest, dtype=kind, device=device)
        for rows, rest, kind in probed.parts
    )
    return Leaves(leaves, probed.names, spec, shape, dtype, probed.text)


class _Probed(NamedTuple):
    """What the quantized values of one block look like."""

    names: tuple[str, ...]
    text: str
    #: of each part: rows for a block, the sizes that follow, and the dtype
    parts: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]


#: that of a format, for elements of a head and a device: a model makes caches of one kind for all layers
_PROBED: dict[Any, _Probed] = {}
#: formats that are remembered before it starts over
_MOST_PROBED = 64


def _probed(spec: Spec, width: int, device: torch.device | str | None) -> _Probed:
    """Found by quantizing zeros.

    Raises:
        ConfigError: parts of the format do not keep tokens and heads apart.
    """
    traced = torch.compiler.is_compiling()
    key = (spec, width, str(device), registry.epoch)
    if not traced and key in _PROBED:
        return _PROBED[key]
    probes = [
        Leaves.of(quantize_values(torch.zeros(2, 3, count, width, device=device), spec))
        for count in (BLOCK, 2 * BLOCK)
    ]
    parts = []
    for name, one, two in zip(probes[0].names, probes[0].leaves, probes[1].leaves, strict=True):
        rows = one.shape[2] if one.dim() > 2 else 0
        grows = tuple(two.shape) == (2, 3, 2 * rows, *one.shape[3:])
        if not rows or not grows or (name == "qdata" and rows != BLOCK):
            raise ConfigError(
                f"{spec}: its part {name!r} of {BLOCK} tokens is {tuple(one.shape)}, and of {2 * BLOCK} "
                f"tokens {tuple(two.shape)}; use a layout and scales that keep tokens and heads apart, "
                "such as 'plain' or 'packed'"
            )
        parts.append((rows, tuple(one.shape[3:]), one.dtype))
    found = _Probed(probes[0].names, probes[0].text, tuple(parts))
    if not traced:
        if len(_PROBED) >= _MOST_PROBED:
            _PROBED.clear()
        _PROBED[key] = found
    return found


def attend_to(kv: QuantizedKV, q: Tensor, **options: Any) -> Tensor:
    """Attention of the last T tokens over a cache; `options` are those of `ao_core.ext.attend`.

    Args:
        kv: the cache, to which the keys and values of these tokens were appended.
        q: (B, Hq, T, D), rotated as the keys are.
        **options: `start`, `stop`, `sinks`, `scale`, `causal`, `window`, `softcap`.

    Returns:
        (B, Hq, T, Dv) in the dtype of q.
    """
    return attend(
        q,
        kv.key,
        kv.value,
        kv.counts,
        tail_key=kv.tail_key,
        tail_value=kv.tail_value,
        center=kv.center,
        **options,
    )


def dequantized(kv: QuantizedKV) -> tuple[Tensor, Tensor]:
    """All keys and values as dense tensors (B, Hkv, tokens, ·) in the logical dtype."""
    tokens, coded = kv.tokens, kv.coded
    stop = -(-coded // BLOCK) * BLOCK
    slots = torch.arange(coded, tokens, device=kv.device) % kv.tail_key.shape[2]
    both = []
    for stored, tail, center in (
        (kv.key, kv.tail_key, kv.center),
        (kv.value, kv.tail_value, None),
    ):
        blocks = cast("QTensor", stored.tensor().narrow(2, 0, stop))
        values = blocks.dequantize(torch.float32)[:, :, :coded]
        values = values if center is None else values + center
        both.append(torch.cat([values.to(kv.dtype), tail.index_select(2, slots)], 2))
    return both[0], both[1]


def bytes_per_token(kv: QuantizedKV) -> float:
    """Bytes that one more token of one row takes once it is in a block."""
    leaves = (*kv.key.leaves, *kv.value.leaves)
    return sum(x.numel() * x.element_size() for x in leaves) / (kv.batch * kv.key.shape[2])

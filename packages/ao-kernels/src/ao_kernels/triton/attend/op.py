"""The launches of attention: the tokens in splits, and where there are several, their sums put together.

Keys and values are read as words of 16 bits. A word is what tensor cores take as an element: the loads that
turn matrices around turn words, and each becomes numbers in the registers where it is multiplied. Which of
the elements a word has follow each other does not matter to a product, so queries are dealt out the same
way, once. Scales never meet codes: those of tokens multiply logits and weights, those of channels queries.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext.kernels import Attention
from ao_kernels.triton.attend.operand import BLOCK_N, Operand, operand, table_of
from ao_kernels.triton.shared.device import on_device, sm_count, supports_pdl
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.tile_config import options

__all__ = ["Shape", "attend", "launch_shape", "settings"]

#: rows of queries of the smallest and the largest tile; those of a warp, whose registers hold their sums
_FEWEST_ROWS, _MOST_ROWS, _ROWS_A_WARP = 16, 64, 8
#: warps of an SM that splits are made for, and tokens of a split at least
_WARPS, _FEWEST_TOKENS = 8, 256
#: tiles of codes that are on their way from memory
STAGES = 3
#: splits that are put together at a time
COMBINED = 32
_LOG2E = 1 / math.log(2)


class Shape(NamedTuple):
    """How a call is launched."""

    #: rows of a tile: queries of all heads that read one of keys
    block_m: int
    #: tokens of codes, or of the tail, at a time
    block_n: int
    warps: int
    #: tiles of rows
    m_tiles: int
    #: splits of the codes
    splits: int


def launch_shape(rows: int, heads: int, memory: int, sms: int) -> Shape:
    """For so many rows of each of `heads` heads of keys (of all rows of the batch), and tokens.

    As few splits as give every SM its warps: they are found without asking how many tokens there are.
    """
    block_m = min(max(_FEWEST_ROWS, 1 << (rows - 1).bit_length()), _MOST_ROWS)
    warps, m_tiles = block_m // _ROWS_A_WARP, -(-rows // block_m)
    wanted = sms * max(_WARPS // warps, 1) // (m_tiles * heads)
    # the largest tile has registers for no more
    block_n = BLOCK_N // 2 if block_m == _MOST_ROWS else BLOCK_N
    return Shape(block_m, block_n, warps, m_tiles, max(min(wanted, memory // _FEWEST_TOKENS), 1))


def settings(
    shape: Shape,
    key: Operand,
    value: Operand,
    attention: Attention,
    element: str | None,
    *,
    split: bool,
) -> dict[str, Any]:
    """The compile-time arguments of the kernel; `element` names those that assembly makes."""
    return {
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "CAUSAL": attention.causal,
        "SOFTCAP": attention.softcap != 0,
        "SPLIT": split,
        **key.constants("K", element),
        **value.constants("V", element),
    }


def attend(
    q: Tensor,
    key: QTensor,
    value: QTensor,
    counts: Tensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    sinks: Tensor | None,
    attention: Attention,
    *,
    splits: int | None = None,
) -> Tensor:
    """Codes become numbers in the registers of a CTA, which has a split of the tokens and 16 to 64 rows.

    `counts` is read on the device: nothing waits for it, and what it says too much is left out. `splits`, of
    the codes: None, as many as `launch_shape` finds.
    """
    from ao_kernels.triton.attend import kernel, kernel_combine

    batch, query_heads, queries, dim = q.shape
    heads, memory, value_dim = key.shape[1], key.shape[2], value.shape[3]
    out = q.new_empty(batch, query_heads, queries, value_dim)
    if out.numel() == 0:
        return out
    keys, values = operand(key.spec, dim, memory), operand(value.spec, value_dim, memory)
    assert isinstance(keys, Operand)  # the record has asked
    assert isinstance(values, Operand)
    q = q if q.stride(-1) == 1 else q.contiguous()
    tail_key, tail_value = (
        x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (tail_key, tail_value)
    )
    group = query_heads // heads
    rows = queries * group
    shape = launch_shape(rows, batch * heads, memory, sm_count(q.device))
    coded = shape.splits if splits is None else splits
    parts = coded + (coded > 1 and tail_key is not None)
    sums, state = out, out
    if parts > 1:
        sums = q.new_empty((parts, batch * heads * rows, value_dim), dtype=torch.float32)
        state = sums.new_empty((parts, batch * heads * rows, 2))
    cap = attention.softcap
    factor = attention.scale * (2 / cap if cap else 1.0) * _LOG2E
    tails = [x for x in (tail_key, tail_value) for _ in range(3)]
    strides = [0 if x is None else x.stride(i % 3) for i, x in enumerate(tails)]
    chosen = settings(
        shape, keys, values, attention, ELEMENTS[q.dtype] if q.is_cuda else None, split=parts > 1
    )
    pdl = supports_pdl(q.device)
    with on_device(q):
        kernel.attend[(parts, shape.m_tiles, batch * heads)](
            q, *_stored(key, keys, q), *_stored(value, values, q), tail_key, tail_value, center, start, stop,
            sinks, counts, sums, state, heads, memory, 0 if tail_key is None else tail_key.shape[2], queries,
            group, attention.window or 1 << 30, coded, factor, cap * _LOG2E, *q.stride()[:3], *strides,
            **chosen, PDL=pdl, **options(shape.warps, STAGES, pdl=pdl),
        )  # fmt: skip
        if parts > 1:
            size = 1 << (value_dim - 1).bit_length()
            kernel_combine.combine[(batch * heads * rows,)](
                sums,
                state,
                out,
                parts,
                batch * heads * rows,
                queries,
                group,
                value_dim,
                size,
                COMBINED,
                PDL=pdl,
                **options(4, 3, pdl=pdl),
            )
    return out


def _stored(x: QTensor, how: Operand, q: Tensor) -> tuple[Tensor | None, ...]:
    """Words, scales, zero points and, where there is no assembly, what codes stand for.

    Memory of a cache is contiguous; slices of it are copied.
    """
    words = x.parts["qdata"].contiguous().view(torch.int16)
    zero = x.parts.get("zero_point")
    table = None if q.is_cuda else table_of(how.numbers, q.device)
    return words, x.parts["scale"].contiguous(), None if zero is None else zero.contiguous(), table

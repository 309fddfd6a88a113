"""Attention over quantized keys and values; see `ao_kernels.triton.attend.op`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.attend.kernel_parts import dealt_out, interleaved, rotated
from ao_kernels.triton.attend.kernel_tile import add_values, logits_of, seen_logits, weights_of
from ao_kernels.triton.shared.kernel_operands import concat_planes
from ao_kernels.triton.shared.kernel_prefetch import start


@triton.jit(
    do_not_specialize=["memory", "slots", "queries", "group", "window", "coded_splits", "softcap"],
    do_not_specialize_on_alignment=[
        "center_ptr",
        "start_ptr",
        "stop_ptr",
        "sinks_ptr",
        "counts_ptr",
    ],
)
def attend(
    q_ptr,
    key_ptr,
    key_scale_ptr,
    key_zero_ptr,
    key_table_ptr,
    value_ptr,
    value_scale_ptr,
    value_zero_ptr,
    value_table_ptr,
    tail_key_ptr,
    tail_value_ptr,
    center_ptr,
    start_ptr,
    stop_ptr,
    sinks_ptr,
    counts_ptr,
    out_ptr,
    state_ptr,
    heads,
    memory,
    slots,
    queries,
    group,
    window,
    coded_splits,
    scale,
    softcap,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kr,
    stride_vb,
    stride_vh,
    stride_vr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    K_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_TOKENS: tl.constexpr,
    K_CHANNELS: tl.constexpr,
    K_PLANES: tl.constexpr,
    K_FLIP: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_ASM: tl.constexpr,
    K_FMA: tl.constexpr,
    K_ROTATION: tl.constexpr,
    V_DIM: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_TOKENS: tl.constexpr,
    V_PLANES: tl.constexpr,
    V_PIECES: tl.constexpr,
    V_FLIP: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_ASM: tl.constexpr,
    V_ROTATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One CTA for BLOCK_M rows, one split of the tokens, and one head of keys of one row of the batch.

    Rows are the queries of all heads that read this one, `group` of them for each token: row r is head r %
    group of token r // group. Codes are those of `coded_splits` splits, BLOCK_N tokens at a time; the tail
    is the last split's. With SPLIT, `out_ptr` (splits, all rows, V_DIM) gets sums of weighted values and
    `state_ptr` (splits, all rows, 2) their greatest logit, in powers of two, and sum of weights; without it,
    `out_ptr` (B, Hq, T, V_DIM) gets the result.

    K_ and V_, of keys and values: GROUP elements of a token share a scale, and TOKENS tokens; with K_CHANNELS
    each element has its own. PLANES codes are in a word, and what FLIP, OFFSET and ASM are `decoded` says.
    Scales of tokens multiply logits and weights, those of channels keys, by FMA, PTX or None. ROTATION
    is (rounds, before, after) of the Hadamard transform that stored elements went through, or None.
    """
    start(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M
    head = tl.program_id(2)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    K_GROUPS: tl.constexpr = (K_DIM + K_GROUP - 1) // K_GROUP
    V_GROUPS: tl.constexpr = (V_DIM + V_GROUP - 1) // V_GROUP
    K_PADDED: tl.constexpr = triton.next_power_of_2(K_GROUPS)
    V_PADDED: tl.constexpr = triton.next_power_of_2(V_GROUPS)
    K_SIZE: tl.constexpr = K_PADDED * K_GROUP
    V_SIZE: tl.constexpr = V_PADDED * V_GROUP
    element = q_ptr.dtype.element_ty

    tokens, coded, low, high = _bounds(
        counts_ptr,
        start_ptr,
        stop_ptr,
        b,
        row,
        BLOCK_M,
        memory,
        slots,
        queries,
        group,
        window,
        CAUSAL,
    )
    offs_m = row + tl.arange(0, BLOCK_M)
    own = tokens - queries + offs_m // group
    inside_m = offs_m < queries * group
    tile_n = tl.arange(0, BLOCK_N)

    d = tl.arange(0, K_SIZE)
    q_at = q_ptr + b * stride_qb + (h * group + offs_m % group) * stride_qh
    q_at = (q_at + (offs_m // group).to(tl.int64) * stride_qt)[:, None] + d[None, :]
    q_inside = inside_m[:, None] & (d < K_DIM)[None, :]
    q = tl.load(q_at, mask=q_inside, other=0.0)
    turned = q
    if K_ROTATION is not None:
        turned = rotated(q.to(tl.float32), K_ROTATION[0], K_ROTATION[1], K_ROTATION[2]).to(element)
    planes = dealt_out(turned, K_PADDED, K_PLANES)
    # the sums of queries that zero points of tokens meet
    moved = ()
    for g in tl.static_range(K_GROUPS):
        of_group = tl.zeros((BLOCK_M,), tl.float32)
        for j in tl.static_range(K_PLANES):
            of_group += tl.sum(planes[g * K_PLANES + j].to(tl.float32), 1)
        moved += (of_group,)
    centered = tl.zeros((BLOCK_M,), tl.float32)
    if center_ptr is not None:
        center = tl.load(center_ptr + head.to(tl.int64) * K_DIM + d, mask=d < K_DIM, other=0.0)
        centered = tl.sum(q.to(tl.float32) * center[None, :], 1)

    greatest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h * group + offs_m % group).to(tl.float32) * 1.4426950408889634
        greatest = tl.where(split == 0, sink, greatest)
        total = tl.where(split == 0, 1.0, total)

    # codes: whole blocks from the one of the first token on, and as many of them for each split
    first = low // BLOCK_N * BLOCK_N
    last = tl.minimum(high, coded)
    a_split = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK_N), coded_splits) * BLOCK_N
    begin = first + split * a_split
    end = tl.minimum(begin + a_split, last)
    stored = b * heads + h
    sums = ()
    for _ in tl.static_range(V_PADDED * V_PIECES):
        sums += (tl.zeros((BLOCK_M, V_GROUP // V_PIECES), tl.float32),)
    units = ()
    zeros = ()
    for _ in tl.static_range(V_GROUPS):
        units += (0.0 if element == tl.float16 else 1.0,)
        zeros += (tl.zeros((BLOCK_M,), tl.float32),)
    for at in range(begin, end, BLOCK_N):
        place = at + tile_n
        logits = logits_of(
            planes, moved, place, at, end, stored, key_ptr, key_scale_ptr, key_zero_ptr, key_table_ptr, q_ptr,
            memory, K_DIM, K_GROUP, K_TOKENS, K_CHANNELS, K_PLANES, K_FLIP, K_OFFSET, K_ASM, K_FMA,
        )  # fmt: skip
        logits = seen_logits(
            logits + centered[:, None],
            place,
            own,
            low,
            end,
            window,
            scale,
            softcap,
            CAUSAL,
            SOFTCAP,
        )
        weights, kept, greatest, total = weights_of(logits, greatest, total)
        sums, units, zeros = add_values(
            weights, kept, sums, units, zeros, place, end, stored, value_ptr, value_scale_ptr,
            value_zero_ptr, value_table_ptr, q_ptr, memory,
            V_DIM, V_GROUP, V_TOKENS, V_PLANES, V_PIECES, V_FLIP, V_OFFSET, V_ASM,
        )  # fmt: skip
    parts = ()
    for g in tl.static_range(V_PADDED):
        for piece in tl.static_range(V_PIECES):
            part = sums[g * V_PIECES + piece]
            if g < V_GROUPS:
                part = (part - zeros[g][:, None]) * units[g]
            parts += (part,)
    acc = interleaved(concat_planes(parts, 0, V_PADDED * V_PIECES), V_PADDED, V_PLANES)
    if V_ROTATION is not None:
        acc = rotated(acc, V_ROTATION[0], V_ROTATION[1], V_ROTATION[2])

    # the tail: exact, elements in their order, and not rotated
    dv = tl.arange(0, V_SIZE)
    if tail_key_ptr is not None:
        k_at = tail_key_ptr + b * stride_kb + h * stride_kh
        v_at = tail_value_ptr + b * stride_vb + h * stride_vh
        # by slots: that of a token is its remainder, and the token of a slot is not before `coded`
        turn = coded % tl.maximum(slots, 1)
        # once more: in the loop over codes, registers have better use; what CSE would merge differs
        q = tl.load(q_at, mask=q_inside, other=0.0, cache_modifier=".ca")
        stop = tl.where((split == tl.num_programs(0) - 1) & (high > coded), slots, 0)
        # a tile of it has the bytes of several tiles of codes: so many fit into shared memory
        for at in tl.range(0, stop, BLOCK_N, num_stages=2):
            slot = at + tile_n
            place = coded - turn + slot + tl.where(slot < turn, slots, 0)
            there = (slot < slots) & (place < high)
            k_inside = there[None, :] & (d < K_DIM)[:, None]
            v_inside = there[:, None] & (dv < V_DIM)[None, :]
            k = tl.load(k_at + slot[None, :] * stride_kr + d[:, None], mask=k_inside, other=0.0)
            logits = tl.dot(q, k)
            logits = seen_logits(
                logits,
                tl.where(there, place, high),
                own,
                low,
                high,
                window,
                scale,
                softcap,
                CAUSAL,
                SOFTCAP,
            )
            weights, kept, greatest, total = weights_of(logits, greatest, total)
            v = tl.load(v_at + slot[:, None] * stride_vr + dv[None, :], mask=v_inside, other=0.0)
            acc = tl.dot(weights.to(element), v, acc * kept[:, None])

    inside = inside_m[:, None] & (dv < V_DIM)[None, :]
    if SPLIT:
        rows = tl.num_programs(2).to(tl.int64) * queries * group
        mine = split * rows + head.to(tl.int64) * queries * group + offs_m
        tl.store(state_ptr + 2 * mine, greatest, mask=inside_m)
        tl.store(state_ptr + 2 * mine + 1, total, mask=inside_m)
        tl.store(out_ptr + (mine * V_DIM)[:, None] + dv[None, :], acc, mask=inside)
    else:
        mine = (head.to(tl.int64) * group + offs_m % group) * queries + offs_m // group
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + (mine * V_DIM)[:, None] + dv[None, :], result.to(element), mask=inside)


@triton.jit
def _bounds(
    counts_ptr, start_ptr, stop_ptr, b, row, BLOCK_M: tl.constexpr, memory, slots, queries, group, window,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """How many tokens there are, and how many in codes; the first that any row of the tile sees, and the end.

    Whatever the counts are, nothing outside of the memory that there is will be read.
    """
    coded = tl.minimum(tl.maximum(tl.load(counts_ptr + 1).to(tl.int32), 0), memory)
    tokens = tl.minimum(tl.load(counts_ptr).to(tl.int32), coded + slots)
    low, high = 0, tokens
    if start_ptr is not None:
        low = tl.maximum(tl.load(start_ptr + b), 0).to(tl.int32)
    if stop_ptr is not None:
        high = tl.minimum(tl.load(stop_ptr + b), tokens).to(tl.int32)
    if CAUSAL:
        before = tokens - queries
        low = tl.maximum(low, before + row // group - window + 1)
        row_last = tl.minimum(row + BLOCK_M, queries * group) - 1
        high = tl.minimum(high, before + row_last // group + 1)
    return tokens, coded, low, high

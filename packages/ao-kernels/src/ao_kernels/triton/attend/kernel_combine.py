"""The results of attention from the sums of all splits."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_prefetch import start


@triton.jit(do_not_specialize=["splits", "rows", "queries", "group"])
def combine(
    sums_ptr,
    state_ptr,
    out_ptr,
    splits,
    rows,
    queries,
    group,
    V_DIM: tl.constexpr,
    V_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of the result from its parts of all splits, SPLITS at a time."""
    start(PDL)
    row = tl.program_id(0)
    dv = tl.arange(0, V_SIZE)
    greatest = float("-inf")
    total = 0.0
    acc = tl.zeros((V_SIZE,), tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        mine = split.to(tl.int64) * rows + row
        logit = tl.load(state_ptr + 2 * mine, mask=split < splits, other=float("-inf"))
        weight = tl.load(state_ptr + 2 * mine + 1, mask=split < splits, other=0.0)
        inside = (split < splits)[:, None] & (dv < V_DIM)[None, :]
        sums = tl.load(sums_ptr + (mine * V_DIM)[:, None] + dv[None, :], mask=inside, other=0.0)
        highest = tl.maximum(greatest, tl.max(logit, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        by = tl.exp2(logit - base)
        kept = tl.exp2(greatest - base)
        acc = acc * kept + tl.sum(sums * by[:, None], 0)
        total = total * kept + tl.sum(weight * by, 0)
        greatest = highest
    result = acc / tl.where(total == 0.0, 1.0, total)
    of_head = queries * group
    r = row % of_head
    mine = (row // of_head).to(tl.int64) * of_head + (r % group) * queries + r // group
    tl.store(out_ptr + mine * V_DIM + dv, result.to(out_ptr.dtype.element_ty), mask=dv < V_DIM)

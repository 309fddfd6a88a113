"""Sums of activations, for matmuls with zero points."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def activation_sums(
    x_ptr,
    out_ptr,
    M,
    K,
    stride_x,
    stride_out,
    group,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums of each `group` neighbouring columns of x (M, K), to float32 (groups, stride_out), 0 from M on."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * group
    last = tl.minimum(first + group, K)
    tile_k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(first, last, BLOCK_K):
        offs_k = start + tile_k
        at = x_ptr + offs_m[:, None].to(tl.int64) * stride_x + offs_k[None, :]
        inside = (offs_m[:, None] < M) & (offs_k[None, :] < last)
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + tl.program_id(1) * stride_out + offs_m
    tl.store(out_at, tl.sum(total, 1), mask=offs_m < stride_out)

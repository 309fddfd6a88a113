"""Matmuls of two operands in 8 bits, scaled in float32; see `ao_kernels.triton.scaled_mm.launch`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_offsets import find
from ao_kernels.triton.shared.kernel_prefetch import start


@triton.jit(
    do_not_specialize=["M", "m_tiles"],
    do_not_specialize_on_alignment=["zero_ptr", "sums_ptr", "bias_ptr", "offs_ptr"],
)
def matmul(
    a,
    b,
    a_scale_ptr,
    b_scale_ptr,
    zero_ptr,
    sums_ptr,
    bias_ptr,
    offs_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    m_tiles,
    experts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUM: tl.constexpr,
    A_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    PROMOTE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """The matmul a (M, K) @ b (N, K).T of codes: one CTA for BLOCK_M × BLOCK_N of it.

    `a` and `b` are TMA descriptors of tiles of BLOCK_K along K, or pointers where TMA is false. A_SCALES and
    B_SCALES: "one", "row", "block" of BLOCK_K along K, for b stored as (K / BLOCK_K, N) with N up to a
    multiple of BLOCK_K, and for b "square" of BLOCK_K rows too. Sums have the type SUM; with PROMOTE those
    of BLOCK_K are added up outside of the tensor cores. The zero-point correction takes off the zero point
    of a row of `a` times the sum of a row of b.

    With GROUPS, a power of two above the number of experts, b is (experts · N, K), and the rows of `a` up to
    offs[e] are those of expert e; what has no expert becomes 0. With PDL it is launched while the kernel in
    front, which may quantize the activations, still runs.
    """
    start(PDL)
    # rasterization in groups of GROUP_M tiles along M: CTAs that run together share both operands in L2
    pid = tl.program_id(0)
    n_tiles = tl.cdiv(N, BLOCK_N)
    top = pid // (GROUP_M * n_tiles) * GROUP_M
    height = tl.minimum(m_tiles - top, GROUP_M)
    m_tile = top + pid % (GROUP_M * n_tiles) % height
    first_n = pid % (GROUP_M * n_tiles) // height * BLOCK_N
    first_m = m_tile * BLOCK_M
    end = M
    b_row = 0
    b_square = first_n // BLOCK_K
    all_k_steps = tl.cdiv(K, BLOCK_K)
    k_steps = all_k_steps
    if GROUPS:
        first_m, end, expert = find(offs_ptr, m_tile, M, experts, BLOCK_M, GROUPS)
        known = expert < experts
        k_steps = tl.where(known, k_steps, 0)
        b_row = tl.where(known, expert * N, 0)
        b_square += tl.where(known, expert * tl.cdiv(N, BLOCK_K), 0)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    inside_m = offs_m < end
    inside_n = offs_n < N

    a_scale_at = a_scale_ptr
    b_scale_at = b_scale_ptr
    if A_SCALES == "block":
        a_scale_at += offs_m.to(tl.int64) * all_k_steps
        b_scale_at += b_square * all_k_steps if B_SCALES == "square" else offs_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for k_step in range(k_steps):
        x = _tile(a, first_m, offs_m, inside_m, k_step, K, stride_a, BLOCK_K, TMA)
        w = _tile(b, b_row + first_n, b_row + offs_n, inside_n, k_step, K, stride_b, BLOCK_K, TMA)
        if A_SCALES == "block":
            by_m = tl.load(a_scale_at + k_step, mask=inside_m, other=0.0)
            if B_SCALES == "square":
                by_m *= tl.load(b_scale_at + k_step)
                acc += tl.dot(x, w.T) * by_m[:, None]
            else:
                by_n = tl.load(b_scale_at + k_step * (tl.cdiv(N, BLOCK_K) * BLOCK_K))
                acc += tl.dot(x, w.T) * by_m[:, None] * by_n[None, :]
        elif PROMOTE:
            acc += tl.dot(x, w.T)
        else:
            acc = tl.dot(x, w.T, acc, out_dtype=SUM)

    if HAS_ZERO:
        zero_point = tl.load(zero_ptr + offs_m, mask=inside_m, other=0)
        acc -= (
            zero_point[:, None]
            * tl.load(sums_ptr + b_row + offs_n, mask=inside_n, other=0)[None, :]
        )
    out = acc.to(tl.float32)
    if A_SCALES == "one":
        out *= tl.load(a_scale_ptr)
    elif A_SCALES == "row":
        out *= tl.load(a_scale_ptr + offs_m, mask=inside_m, other=0.0)[:, None]
    if B_SCALES == "one":
        out *= tl.load(b_scale_ptr)
    elif B_SCALES == "row":
        out *= tl.load(b_scale_ptr + b_row + offs_n, mask=inside_n, other=0.0)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + offs_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if GROUPS:
        out = tl.where(known, out, 0.0)
    at = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    inside = inside_m[:, None] & inside_n[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tile(of, first, offs_m, inside, k_step, K, stride, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """K from `k_step` · BLOCK_K on, of the rows from `first` on; outside is 0."""
    if TMA:
        tile = of.load([first, k_step * BLOCK_K])
    else:
        inner = k_step * BLOCK_K + tl.arange(0, BLOCK_K)
        at = of + offs_m.to(tl.int64)[:, None] * stride + inner[None, :]
        tile = tl.load(at, mask=inside[:, None] & (inner < K)[None, :], other=0.0)
    return tile

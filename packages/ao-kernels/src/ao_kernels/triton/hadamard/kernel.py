"""The Hadamard transform of blocks; see `ao_kernels.triton.hadamard.op`."""

# mypy: ignore-errors

import triton
import triton.language as tl

from ao_kernels.triton.shared.kernel_prefetch import start


@triton.jit(do_not_specialize=["blocks"])
def transform(
    x_ptr,
    y_ptr,
    blocks,
    before,
    after,
    BLOCKS: tl.constexpr,
    ORDER: tl.constexpr,
    PADDED: tl.constexpr,
    POWER: tl.constexpr,
    ROUNDS: tl.constexpr,
    SIGNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCKS blocks of ORDER · POWER elements, which lie one behind the other in x and y.

    ORDER: of the Paley matrix, whose rows are the bits of SIGNS, set for -1; 1 where there is none.
    POWER = 2**ROUNDS. x is multiplied by `before` and sums by `after`. PADDED: ORDER as a power of
    two, 16 at least where there is a matrix.
    """
    start(PDL)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    places = tl.arange(0, PADDED * POWER)
    inside = (block < blocks)[:, None] & (places < ORDER * POWER)[None, :]
    at = block.to(tl.int64)[:, None] * (ORDER * POWER) + places[None, :]
    y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * before
    # BLOCKS · PADDED runs of POWER elements
    y = tl.reshape(y, (BLOCKS * PADDED, POWER))
    for _ in tl.static_range(ROUNDS):
        # the lowest bit of the place goes to the top: after all rounds each is where it was
        even, odd = tl.split(tl.reshape(y, (BLOCKS * PADDED, POWER // 2, 2)))
        pair = tl.join(even + odd, even - odd)
        y = tl.reshape(tl.permute(pair, (0, 2, 1)), (BLOCKS * PADDED, POWER))
    if ORDER > 1:
        # the runs of a block are the rows that its matrix sums up
        tl.static_assert(BLOCKS == 1)
        row = tl.arange(0, PADDED)
        bits = tl.zeros((PADDED,), tl.int64)
        for i in tl.static_range(ORDER):
            bits = tl.where(row == i, SIGNS[i], bits)
        negative = (bits[:, None] >> row[None, :] & 1) == 1
        signs = tl.where(negative, -1.0, 1.0)
        signs = tl.where((row < ORDER)[:, None] & (row < ORDER)[None, :], signs, 0.0)
        # ±1 is exact in TF32, so what is left of x after three products is below float32's rounding
        y = tl.dot(signs, y, input_precision="tf32x3")
    y = tl.reshape(y, (BLOCKS, PADDED * POWER)) * after
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)

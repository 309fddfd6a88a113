"""What the Triton kernels of sparsity may cost: part of the table in `checks`."""

from __future__ import annotations

from functools import partial

import torch

from ao_kernels.triton.bsr import launch as bsr
from ao_kernels.triton.sparsify import op as sparsify
from ao_kernels.triton.sparsify.op import PICK
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, FP32, TYPES

__all__ = ["CHECKS"]


_CHOSEN = {"STEPS": sparsify.STEPS, "VECTOR": True, "PICK": PICK}


def _build_rows() -> Build:
    """The kernel `rows`, as `sparsify24` launches it."""
    from ao_kernels.triton.sparsify import kernel

    pointers = {"x_ptr": TYPES[BF16], "values_ptr": "*i32", "index_ptr": "*u8"}
    sizes = ("N", "K", "stride", "groups")
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(kernel.rows, types, _CHOSEN, 90, sparsify.WARPS, 1, (*pointers, *sizes))


def _build_tiles(dtype: torch.dtype, order: str | None) -> Build:
    """The kernel `tiles`, as `sparsify24_both` launches it, or without an order `tile_mask`."""
    from ao_kernels.triton.sparsify import kernel

    words = ("mask_ptr", "values_ptr", "values_t_ptr", "bits_ptr")
    pointers = {
        "x_ptr": TYPES[dtype],
        **dict.fromkeys(words, "*i64"),
        **dict.fromkeys(("meta_ptr", "meta_t_ptr"), "*u8"),
    }
    padded = ("N", "K", "stride", "rows_padded", "cols_padded")
    sizes = (*padded, "mask_words", "words", "words_t", "pieces")
    chosen = _CHOSEN | {"PACKS": order is not None, "BLOCKED": order == "cusparselt"}
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(kernel.tiles, types, chosen, 90, sparsify.WARPS, 1, (*pointers, *padded))


def _sparsify_gate(
    name: str,
    build: partial[Build],
    budget: float,
    registers: int,
    elements: int,
    bytes_: float,
    loads: int,
) -> Check:
    """For 128 bytes that are read or written. What threads share are neighbouring bytes alone."""
    return Check(
        name,
        build,
        registers,
        shared=0,
        work=elements * bytes_ / 128,
        budget=budget,
        holding=("LDG",),
        counts={"LDG": loads},
        present=("PRMT|LOP3",),
        absent=("I2F", "SHFL", "LDL", "STL", "BAR", "STS"),
    )


def _rows_gate(budget: float) -> Check:
    """A turn is over 4 × 256; of an element 2 bytes are read, 1 and 1/8 are written."""
    return _sparsify_gate(
        "sm_90 sparsify rows bf16", partial(_build_rows), budget, 64, 4 * 256, 3.125, 2
    )


def _tiles_gate(budget: float, dtype: torch.dtype, order: str | None) -> Check:
    """A turn is over 32 × 256; an element is read; written are twice 1 and 1/8, and 1/8, or 1."""
    name = f"sm_90 sparsify tiles {order or 'mask'} {TYPES[dtype][1:]}"
    bytes_ = dtype.itemsize + (1 if order is None else 2.375)
    build = partial(_build_tiles, dtype, order)
    return _sparsify_gate(name, build, budget, 168, 32 * 256, bytes_, 8 * dtype.itemsize)


#: splits of a row of blocks
_SPLITS = 4


def _build_bsr(side: int, m: int) -> Build:
    """The kernel of matmuls with block-sparse weights, with a bias, as `bsr.launch` launches it."""
    from ao_kernels.triton.bsr import kernel

    config = bsr.tile_config_of(m, side, BF16)
    pointers = {
        **dict.fromkeys(("x_ptr", "blocks_ptr"), TYPES[BF16]),
        **dict.fromkeys(("cols_ptr", "starts_ptr", "order_ptr"), "*i32"),
        **dict.fromkeys(("bias_ptr", "out_ptr"), TYPES[BF16]),
        "partial_ptr": "*fp32",
        "semaphore_ptr": "*i32",
    }
    return Build(
        kernel.linear,
        {**pointers, **dict.fromkeys(("M", "N", "K", "stride_x", "splits"), "i32")},
        bsr.settings(side, config, _SPLITS, BF16, bias=True, even=True),
        90,
        config.num_warps,
        config.num_stages,
        (*(p for p in pointers if p not in ("bias_ptr", "semaphore_ptr")), "N", "K", "stride_x"),
    )


def _bsr_gate(budget: float, side: int, m: int) -> Check:
    """For 128 bytes of weights. A turn is over the blocks that are loaded at once.

    Warp groups multiply 64 × 16, in smaller blocks warps 16 × 16 by 8 rows.
    """
    config = bsr.tile_config_of(m, side, BF16)
    chosen = bsr.settings(side, config, _SPLITS, BF16, bias=True, even=True)
    columns = chosen["BLOCKS_PER_DOT"] * side
    hmma = side * columns * config.block_m // (16 * 16 * 8 * config.num_warps)
    counts = {"HGMMA": columns // 16} if side == 64 else {"HMMA": hmma}
    return Check(
        f"sm_90 bsr {side} bf16 rows {config.block_m}",
        partial(_build_bsr, side, m),
        registers=255,
        shared=99 * 1024,
        work=side * columns * BF16.itemsize / 128,
        budget=budget,
        counts=counts,
        present=("LDGSTS", *counts),
    )


CHECKS: tuple[Check, ...] = (
    _rows_gate(19.0),
    _tiles_gate(25.8, BF16, "cutlass"),
    _tiles_gate(25.8, FP32, None),
    _bsr_gate(6.0, 64, 16),
    # what ptxas makes of this loop depends on masks and unrolling in the epilogue behind it: 5.3 to 6.6
    _bsr_gate(6.7, 16, 16),
)

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

__all__ = ["CHECKS", "build_bsr", "build_rows", "build_tiles"]


def _chosen(vector: bool) -> dict[str, object]:
    return {"STEPS": sparsify.STEPS, "VECTOR": vector, "PICK": PICK}


def build_rows(dtype: torch.dtype = BF16, *, vector: bool = True, arch: int = 90) -> Build:
    """The kernel `rows`, as `sparsify24` launches it."""
    from ao_kernels.triton.sparsify import kernel

    pointers = {"x_ptr": TYPES[dtype], "values_ptr": "*i32", "index_ptr": "*u8"}
    sizes = ("N", "K", "stride", "groups")
    aligned = (*pointers, *(sizes if vector else ()))
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(kernel.rows, types, _chosen(vector), arch, sparsify.WARPS, 1, aligned)


def build_tiles(
    dtype: torch.dtype = BF16, order: str | None = "cutlass", *, arch: int = 90
) -> Build:
    """The kernel `tiles`, as `sparsify24_both` launches it, or without an order `tile_mask`."""
    from ao_kernels.triton.sparsify import kernel

    meta = "*u8"
    pointers = {
        "x_ptr": TYPES[dtype],
        "mask_ptr": "*i64",
        "values_ptr": "*i64",
        "meta_ptr": meta,
        "values_t_ptr": "*i64",
        "meta_t_ptr": meta,
        "bits_ptr": "*i64",
    }
    padded = ("N", "K", "stride", "rows_padded", "cols_padded")
    sizes = (*padded, "mask_words", "words", "words_t", "pieces")
    chosen = _chosen(True) | {"PACKS": order is not None, "BLOCKED": order == "cusparselt"}
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(kernel.tiles, types, chosen, arch, sparsify.WARPS, 1, (*pointers, *padded))


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


def _rows_gate(
    budget: float, dtype: torch.dtype = BF16, *, vector: bool = True, arch: int = 90
) -> Check:
    """A turn is over 4 × 256; of an element 2 bytes are read, 1 and 1/8 are written."""
    ragged = "" if vector else " ragged"
    name = f"sm_{arch} sparsify rows {TYPES[dtype][1:]}{ragged}"
    build = partial(build_rows, dtype, vector=vector, arch=arch)
    return _sparsify_gate(name, build, budget, 64, 4 * 256, 3.125, 2 if vector else 8)


def _tiles_gate(
    budget: float, dtype: torch.dtype = BF16, order: str | None = "cutlass", *, arch: int = 90
) -> Check:
    """A turn is over 32 × 256; an element is read; written are twice 1 and 1/8, and 1/8, or 1."""
    name = f"sm_{arch} sparsify tiles {order or 'mask'} {TYPES[dtype][1:]}"
    build = partial(build_tiles, dtype, order, arch=arch)
    bytes_ = dtype.itemsize + (1 if order is None else 2.375)
    return _sparsify_gate(name, build, budget, 168, 32 * 256, bytes_, 8 * dtype.itemsize)


def build_bsr(
    side: int,
    m: int,
    dtype: torch.dtype = BF16,
    *,
    even: bool = True,
    splits: int = 4,
    arch: int = 90,
) -> Build:
    """The kernel of matmuls with block-sparse weights, with a bias, as `bsr.launch` launches it."""
    from ao_kernels.triton.bsr import kernel

    config, x = bsr.tile_config_of(m, side, dtype), TYPES[dtype]
    pointers = {
        "x_ptr": x,
        "blocks_ptr": x,
        "cols_ptr": "*i32",
        "starts_ptr": "*i32",
        "order_ptr": "*i32",
        "bias_ptr": x,
        "out_ptr": x,
        "partial_ptr": "*fp32" if splits > 1 else x,
        "semaphore_ptr": "*i32" if splits > 1 else x,
    }
    return Build(
        kernel.linear,
        {**pointers, **dict.fromkeys(("M", "N", "K", "stride_x", "splits"), "i32")},
        bsr.settings(side, config, splits, dtype, bias=True, even=even),
        arch,
        config.num_warps,
        config.num_stages,
        (*(p for p in pointers if p not in ("bias_ptr", "semaphore_ptr")), "N", "K", "stride_x"),
    )


def _bsr_gate(
    budget: float,
    side: int,
    m: int,
    dtype: torch.dtype = BF16,
    *,
    even: bool = True,
    arch: int = 90,
) -> Check:
    """For 128 bytes of weights. A turn is over the blocks that are loaded at once.

    Warp groups multiply 64 × 16, before sm_90 and in smaller blocks warps 16 × 16 by 8 rows.
    """
    config = bsr.tile_config_of(m, side, dtype)
    chosen = bsr.settings(side, config, 4, dtype, bias=True, even=even)
    columns = chosen["BLOCKS_PER_DOT"] * side
    ragged = "" if even else " ragged"
    name = f"sm_{arch} bsr {side} {TYPES[dtype][1:]} rows {config.block_m}{ragged}"
    build = partial(build_bsr, side, m, dtype, even=even, arch=arch)
    groups = arch == 90 and side == 64
    if arch >= 100 and side == 64:  # tensor memory: another loop, for which no budget is known
        return Check(name, build, 255, 227 * 1024)
    counts = {}
    if dtype != FP32:
        hmma = side * columns * config.block_m // (16 * 16 * 8 * config.num_warps)
        counts = {"HGMMA": columns // 16} if groups else {"HMMA": hmma}
    return Check(
        name,
        build,
        registers=255,
        shared=99 * 1024,
        work=side * columns * dtype.itemsize / 128,
        budget=budget,
        counts=counts,
        present=("LDGSTS", "HGMMA" if groups else "HMMA"),
    )


CHECKS: tuple[Check, ...] = (
    _rows_gate(19.0),
    _tiles_gate(25.8),
    _tiles_gate(25.8, FP32, None),
    _bsr_gate(6.0, 64, 16),
    # what ptxas makes of this loop depends on masks and unrolling in the epilogue behind it: 5.3 to 6.6
    _bsr_gate(6.7, 16, 16),
)

"""2:4 sparsity from dense matrices in one read, as it is stored and as sparse tensor cores take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext import ConfigError, UnsupportedOp
from ao_kernels.triton.shared.device import on_device
from ao_kernels.triton.shared.ops import define

__all__ = [
    "INPUTS",
    "MASKED",
    "ORDERS",
    "PICK",
    "STEPS",
    "WARPS",
    "sparsify24",
    "sparsify24_both",
    "tile_mask",
]

#: four bytes out of the eight of $1 and $2, as the nibbles of $3 name them
PICK = "prmt.b32 $0, $1, $2, $3;"
#: how the indices of `sparsify24_both` lie
ORDERS = ("cutlass", "cusparselt")
#: iterations of a CTA's loop, and its warps
STEPS, WARPS = 4, 4
INPUTS = (torch.bfloat16, torch.float16)
#: what a mask is found of: float32, too, where the weight is that and autocast multiplies in 16 bits
MASKED = (*INPUTS, torch.float32)
Packs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Sizes(NamedTuple):
    """Shapes of what `sparsify24_both` gives for a matrix (n, k)."""

    rows: int
    cols: int
    rows_t: int
    cols_t: int

    @classmethod
    def of(cls, n: int, k: int) -> Sizes:
        """Rows of either pack in multiples of 32, columns in multiples of 64."""
        (n32, n64), (k32, k64) = ([-(-size // step) * step for step in (32, 64)] for size in (n, k))
        return cls(n32, k64, k32, n64)


def _sparsify24(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two of the greatest magnitude of every four of x (N, K); ties to the first, NaN counts as infinity.

    Infinities become the greatest finite number, as where dense values are encoded.

    Returns:
        The parts `qdata` (N, 2 * ceil(K / 4)), in the dtype of x, and `index`, uint8 (N, ceil(K / 8)), of the
        layout "two_four".
    """
    _check(x)
    out = _canonical(x)
    launch_rows(x, *out)
    return out


def _sparsify24_both(x: Tensor, order: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The best eight of each 4 × 4 tile of x (N, K), packed for matmuls with x and with its transpose.

    Of every tile those stay, two in each row and column, whose magnitudes have the greatest sum. Sizes
    are padded with zeros: rows to multiples of 32, columns to multiples of 64.

    Args:
        x: bfloat16 or float16; NaN and infinities stay where their number allows.
        order: "cutlass", or "cusparselt", for sizes that are multiples of 128: how indices lie.

    Returns:
        The five outputs of `torch._sparse_semi_structured_tile`: packed values and int16 indices of x, the
        same of its transpose, and uint8 (N / 8, K / 8, 8), the 16 bits of each tile. With "cutlass" they
        are (N, K / 2) and (N, 2, K / 32); with "cusparselt" the first holds the indices behind the values,
        and the second is empty.
    """
    _check(x, order)
    out = _packs(x, order)
    launch_tiles(x, order, out)
    return _turned(out)


def _tile_mask(x: Tensor) -> Tensor:
    """True for what `sparsify24_both` keeps of x (N, K)."""
    _check(x, known=MASKED)
    n, k = x.shape
    mask = x.new_empty((n, -(-k // 8) * 8), dtype=torch.uint8)
    launch_tiles(x, None, (mask,))
    return mask.view(torch.bool)[:, :k].contiguous()


def _canonical(x: Tensor) -> tuple[Tensor, Tensor]:
    n, k = x.shape
    groups = -(-k // 4)
    return x.new_empty((n, 2 * groups)), x.new_empty((n, -(-groups // 2)), dtype=torch.uint8)


def _packs(x: Tensor, order: str) -> Packs:
    sizes = Sizes.of(*x.shape)
    out: list[Tensor] = []
    for rows, cols in (sizes[:2], sizes[2:]):
        apart = order == "cutlass"
        out.append(x.new_empty((rows, cols // 2) if apart else (rows * cols * 9 // 16,)))
        out.append(x.new_empty((cols // 32 if apart else 0, rows, 2), dtype=torch.int16))
    bits = x.new_empty((sizes.rows // 8, sizes.cols // 8, 8), dtype=torch.uint8)
    return out[0], out[1], out[2], out[3], bits


def _turned(packs: Packs) -> Packs:
    """With the dimensions of indices in torch's order."""
    values, meta, values_t, meta_t, bits = packs
    return values, meta.permute(1, 2, 0), values_t, meta_t.permute(1, 2, 0), bits


def _check(x: Tensor, order: str = "cutlass", known: tuple[torch.dtype, ...] = INPUTS) -> None:
    if x.dim() != 2 or 0 in x.shape or x.dtype not in known:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise UnsupportedOp(
            f"x: 2:4 sparsity in Triton is for matrices in {names} that are not empty, found {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )
    if order not in ORDERS:
        raise ConfigError(f"order={order!r} is unknown; use one of {', '.join(ORDERS)}")
    if order == "cusparselt" and any(size % 128 for size in x.shape):
        raise UnsupportedOp(
            f"order='cusparselt' is for sizes that are multiples of 128, found {tuple(x.shape)}; "
            "order='cutlass' is for any"
        )


def settings(x: Tensor) -> dict[str, Any]:
    """The compile-time arguments that both kernels take of a matrix with rows in one piece."""
    vector = x.shape[1] % 4 == 0 and x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
    return {"STEPS": STEPS, "VECTOR": vector, "PICK": PICK if x.is_cuda else None}


def launch_rows(x: Tensor, values: Tensor, index: Tensor) -> None:
    """Fill the parts of `sparsify24`."""
    from ao_kernels.triton.sparsify import kernel

    x = x if x.stride(1) == 1 else x.contiguous()
    n, k = x.shape
    groups = values.shape[1] // 2
    with on_device(x):
        kernel.rows[(-(-n // (4 * STEPS)), -(-groups // 64))](
            x, values.view(torch.int32), index, n, k, x.stride(0), groups,
            **settings(x), num_warps=WARPS, num_stages=1,
        )  # fmt: skip


def launch_tiles(x: Tensor, order: str | None, out: tuple[Tensor, ...]) -> None:
    """Fill what `_packs` made, or without an order the mask of `tile_mask`."""
    from ao_kernels.triton.sparsify import kernel

    x = x if x.stride(1) == 1 else x.contiguous()
    n, k = x.shape
    sizes = Sizes.of(n, k)
    values, meta, values_t, meta_t, bits = out * 5 if order is None else out
    if order == "cusparselt":  # one tensor: eight parts of values, one of indices
        meta, meta_t = (each[each.numel() // 9 * 8 :] for each in (values, values_t))
    wide = [each.view(torch.int64) for each in (out[0], values, values_t, bits)]
    with on_device(x):
        kernel.tiles[(-(-sizes.cols_t // (32 * STEPS)), -(-k // 256))](
            x, wide[0], wide[1], meta.view(torch.uint8), wide[2], meta_t.view(torch.uint8), wide[3],
            n, k, x.stride(0), -(-k // 8), sizes.rows, sizes.rows_t,
            sizes.cols // 8, sizes.cols_t // 8, sizes.cols // 8,
            **settings(x), PACKS=order is not None, BLOCKED=order == "cusparselt",
            num_warps=WARPS, num_stages=1,
        )  # fmt: skip


sparsify24 = define("sparsify24(Tensor x) -> (Tensor, Tensor)", _sparsify24, _canonical)
sparsify24_both = define(
    "sparsify24_both(Tensor x, str order) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _sparsify24_both,
    lambda x, order: _turned(_packs(x, order)),
)
tile_mask = define(
    "tile_mask(Tensor x) -> Tensor",
    _tile_mask,
    lambda x: torch.empty_like(x, dtype=torch.bool, memory_format=torch.contiguous_format),
)

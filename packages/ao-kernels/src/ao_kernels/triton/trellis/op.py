"""Custom ops around the launches for weights on a trellis."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from ao_core.ext.kernels import neutral
from ao_core.ext.numerics import TRELLIS_MULTIPLIERS, TRELLIS_UNIT, trellis_values
from ao_kernels.triton.shared.device import capturing, on_device
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.workspace import rows_of

__all__ = [
    "BLOCK_K",
    "BLOCK_N",
    "DENSE_K",
    "RING",
    "WARPS",
    "block_of_rows",
    "constants",
    "dequantize",
    "linear",
    "prepare",
]

#: rows of a weight whose codes are a ring
RING = 128
#: rows and columns of the weight that a CTA of a matmul decodes at a time
BLOCK_N, BLOCK_K = 32, 64
#: columns that a CTA decodes to dense values
DENSE_K = 32
WARPS = 4


#: the values of states, on each device that was prepared
_tables: dict[torch.device, Tensor] = {}


def prepare(device: torch.device) -> None:
    """Copy the values of states to a device, once. Never in a launch, as what that makes is not kept."""
    if device not in _tables:
        with neutral():
            _tables[device] = _copied(device)


def _copied(device: torch.device) -> Tensor:
    return torch.tensor(trellis_values(), dtype=torch.int8, device="cpu").to(device)


def _table(device: torch.device) -> Tensor:
    """The values of states on a device; without those of `prepare` a launch has its own.

    In a CUDA graph by fills, 8 values each: a copy from the host cannot be captured.
    """
    if device in _tables:
        return _tables[device]
    if not capturing(device):
        return _copied(device)
    words = struct.unpack("<32q", struct.pack("<256b", *trellis_values()))
    table = torch.empty(len(words), dtype=torch.int64, device=device)
    for each, word in zip(table.unbind(), words, strict=True):
        each.fill_(word)
    return table.view(torch.int8)


def constants(bits: int) -> dict[str, Any]:
    """Compile-time arguments that all kernels have."""
    return {
        "BITS": bits,
        "RING": RING,
        "MULTIPLIER": TRELLIS_MULTIPLIERS[bits],
        "UNIT": TRELLIS_UNIT,
    }


def block_of_rows(m: int) -> int:
    """Rows of activations that a CTA multiplies."""
    return 16 if m <= 16 else 32 if m <= 32 else 64


def _dequantize(
    qdata: Tensor, scale: Tensor, bits: int, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """Dense values (n, k): qdata uint8 (rings, k · 16 · bits), scale (n, 1)."""
    from ao_kernels.triton.trellis import kernel

    out = qdata.new_empty((n, k), dtype=dtype)
    if out.numel() == 0:
        return out
    with on_device(qdata):
        kernel.dequantize[(-(-n // RING), -(-k // DENSE_K))](
            qdata.contiguous().view(torch.int32), scale.contiguous(), _table(qdata.device), out, n, k,
            **constants(bits), BLOCK_K=DENSE_K, num_warps=WARPS,
        )  # fmt: skip
    return out


def _linear(
    x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, bits: int, n: int
) -> Tensor:
    """Multiply x (…, k) by the transpose of a weight (n, k), and add the bias."""
    from ao_kernels.triton.trellis import kernel

    k = x.shape[-1]
    x_MK = rows_of(x, k)
    m, out = x_MK.shape[0], x.new_empty((*x.shape[:-1], n))
    if out.numel() == 0:
        return out
    block_m = block_of_rows(m)
    with on_device(x):
        kernel.linear[(-(-n // BLOCK_N), -(-m // block_m))](
            x_MK, qdata.contiguous().view(torch.int32), scale.contiguous(), _table(x.device),
            out if bias is None else bias.contiguous(), out, m, n, k, x_MK.stride(0),
            **constants(bits), BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            HAS_BIAS=bias is not None, num_warps=WARPS,
        )  # fmt: skip
    return out


dequantize = define(
    "ring_dequantize(Tensor qdata, Tensor scale, int bits, SymInt n, SymInt k, ScalarType dtype) -> Tensor",
    _dequantize,
    lambda qdata, scale, bits, n, k, dtype: qdata.new_empty((n, k), dtype=dtype),
)
linear = define(
    "ring_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, int bits, SymInt n) -> Tensor",
    _linear,
    lambda x, qdata, scale, bias, bits, n: x.new_empty((*x.shape[:-1], n)),
)

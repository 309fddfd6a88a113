"""The kernel of `write_tail` on the CPU: rows are copied in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Kernel
from ao_core.ext.kernels import WriteTailCall
from ao_kernels.cpu.library import unavailable
from ao_kernels.cpu.quantize import ELEMENTS

__all__ = ["TAIL_KERNELS", "write_tail"]


def write_tail(
    counts: Tensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    coded: int,
) -> None:
    """All rows are copied in one call into C++, without gradients."""
    torch.ops.ao_kernels.write_tail.default(
        counts, tail_key, tail_value, key.detach(), value.detach(), coded
    )


def _refuses(call: WriteTailCall) -> str | None:
    if call.dtype not in ELEMENTS:
        return f"copies float32, bfloat16 and float16, not {call.dtype}"
    return None


TAIL_KERNELS = (
    Kernel("cpu_write_tail", "write_tail", "plain", "cpu", write_tail, 50, unavailable, _refuses),
)

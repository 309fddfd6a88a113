"""The kernel records of `attend`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_core import Kernel
from ao_core.ext.kernels import AttendCall
from ao_kernels.triton.attend.op import attend as launch
from ao_kernels.triton.attend.op import launch_shape
from ao_kernels.triton.attend.operand import operand
from ao_kernels.triton.shared.device import current_device, sm_count, unavailable
from ao_kernels.triton.shared.dtypes import ELEMENTS

__all__ = ["ATTEND_KERNELS", "attend"]


def attend(*args: Any) -> Tensor:
    """Codes become numbers in the registers where they are multiplied; tokens are read in splits."""
    return launch(*args)


def _refuses(call: AttendCall) -> str | None:
    if call.dtype not in ELEMENTS:
        return f"reads queries in bfloat16 and float16, not {call.dtype}"
    if 0 in call.key_shape:
        return f"needs memory for keys, found {call.key_shape}"
    memory = call.key_shape[2]
    pairs = (("keys", call.key, call.key_shape[3]), ("values", call.value, call.value_dim))
    for name, spec, dim in pairs:
        found = operand(spec, dim, memory)
        if isinstance(found, str):
            return f"of {name}: {found}"
        if name == "values" and found.channels:
            return f"of values: takes scales of tokens, found {spec}"
    return None


def _describe(call: AttendCall) -> str:
    batch, heads, memory = call.key_shape[:3]
    rows = call.q_shape[1] // heads * call.q_shape[2]
    shape = launch_shape(max(rows, 1), batch * heads, memory, sm_count(current_device()))
    return f"tiles of {shape.block_m} rows, {shape.splits} splits of the tokens, sums in float32"


ATTEND_KERNELS = tuple(
    Kernel(
        f"triton_attend_{layout}", "attend", layout, "cuda", attend, 50, unavailable, _refuses, _describe,
        fuses=("hadamard",),
    )
    for layout in ("plain", "packed")
)  # fmt: skip

"""The kernel records of `attend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core import Kernel
from ao_core.ext.kernels import AttendCall
from ao_kernels.triton.attend.op import attend as launch
from ao_kernels.triton.attend.op import launch_shape
from ao_kernels.triton.attend.operand import operand
from ao_kernels.triton.shared.device import current_device, sm_count, unavailable
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.known_answer import MATMUL, Sample, every_code, noise, proven

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


def _sample(call: AttendCall) -> Sample:
    """Two heads of keys, in splits where those of the call are, with all that the call has."""
    batch, heads, memory, dim = call.key_shape
    group, queries = call.q_shape[1] // heads, min(max(call.q_shape[2], 1), 64)
    shape = launch_shape(group * queries, batch * heads, memory, sm_count(current_device()))
    tokens, slots = 1024 if shape.splits > 1 else 256, 128 if call.tail else 0

    def arguments() -> tuple[object, ...]:
        q = noise((1, 2 * group, queries, dim), call.dtype)
        keys = (
            every_code(call.key, (1, 2, tokens, dim)),
            every_code(call.value, (1, 2, tokens, call.value_dim)),
        )
        counts = torch.tensor([tokens + slots // 2, tokens])
        tail = (
            [noise((1, 2, slots, d), call.dtype) for d in (dim, call.value_dim)]
            if slots
            else [None, None]
        )
        center = noise((1, 2, 1, dim)) if call.centered else None
        ends = [torch.tensor([3]), torch.tensor([tokens])] if call.padded else [None, None]
        sinks = noise((2 * group,), call.dtype) if call.sinks else None
        return q, *keys, counts, *tail, center, *ends, sinks, call.attention

    facts = (
        repr(call.key), repr(call.value), dim, call.value_dim, call.dtype, shape.block_m, queries, group,
        tokens,
        slots, call.centered, call.padded, call.sinks, call.attention.causal, call.attention.softcap != 0,
    )  # fmt: skip
    return Sample(facts, arguments, 2 * MATMUL)


ATTEND_KERNELS = tuple(
    Kernel(
        f"triton_attend_{layout}", "attend", layout, "cuda", attend, 50, unavailable,
        proven("attend", attend, _refuses, _sample), _describe,
        fuses=("hadamard",),
    )
    for layout in ("plain", "packed")
)  # fmt: skip

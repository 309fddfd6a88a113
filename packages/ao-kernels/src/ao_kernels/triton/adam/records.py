"""The kernel record of `adam_step`."""

from __future__ import annotations

from ao_core.records import Call, Kernel
from ao_kernels.triton.adam.op import STATES, TYPES, adam_step
from ao_kernels.triton.shared.device import why_not_float8

__all__ = ["ADAM_KERNELS"]


def _refuses(call: Call) -> str | None:
    if call.spec != STATES[0]:
        return f"needs moments in {STATES[0]}, found {call.spec}"
    if call.x_dtype not in TYPES:
        return f"updates parameters of float32, bfloat16 and float16, not {call.x_dtype}"
    return None


ADAM_KERNELS = (
    Kernel(
        "triton_adam_step", "adam_step", "flat", "cuda", adam_step, 50, why_not_float8, _refuses
    ),
)

"""The kernel record of `adam_step`."""

from __future__ import annotations

from ao_core import Kernel
from ao_kernels.adam import AdamCall
from ao_kernels.triton.adam.op import STATES, TYPES, adam_step
from ao_kernels.triton.shared.device import unavailable_float8

__all__ = ["ADAM_KERNELS"]


def _refuses(call: AdamCall) -> str | None:
    if (call.exp_avg, call.exp_avg_sq) != STATES:
        wanted, found = (
            " and ".join(map(str, pair)) for pair in (STATES, (call.exp_avg, call.exp_avg_sq))
        )
        return f"needs moments in {wanted}, found {found}"
    for what, dtype in (("parameters", call.param_dtype), ("gradients", call.grad_dtype)):
        if dtype not in TYPES:
            return f"takes {what} of float32, bfloat16 and float16, not {dtype}"
    return None


ADAM_KERNELS = (
    Kernel(
        "triton_adam_step", "adam_step", "flat", "cuda", adam_step, 50, unavailable_float8, _refuses
    ),
)

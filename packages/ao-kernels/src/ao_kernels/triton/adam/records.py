"""The kernel record of `adam_step`."""

from __future__ import annotations

from typing import Any

import torch

from ao_core import Kernel, quantize_tensor
from ao_kernels.optim import StepCall
from ao_kernels.triton.adam.op import STATES, TYPES, adam_step
from ao_kernels.triton.shared.device import unavailable, unavailable_float8
from ao_kernels.triton.shared.known_answer import Sample, noise, proven

__all__ = ["ADAM_KERNELS"]


#: the options of the step that a known-answer test takes
_STEP: dict[str, Any] = {
    "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 3, "decoupled": True,
    "maximize": False, "seed": None,
}  # fmt: skip


def _refuses(call: StepCall) -> str | None:
    if call.specs not in STATES:
        *wanted, found = (" and ".join(map(str, pair)) for pair in (*STATES, call.specs))
        return f"needs moments in {', or '.join(wanted)}, found {found}"
    for what, dtype in (("parameters", call.param_dtype), ("gradients", call.grad_dtype)):
        if dtype not in TYPES:
            return f"takes {what} of float32, bfloat16 and float16, not {dtype}"
    if call.specs == STATES[0] and torch.cuda.is_available():
        return unavailable_float8()
    return None


def _sample(call: StepCall) -> Sample:
    """A block and a part of one, and less than that; codes of moments may be those beside the reference's."""

    def arguments() -> tuple[object, ...]:
        shapes = ((700,), (3,))
        params = [noise(shape, call.param_dtype) for shape in shapes]
        grads = [noise(shape, call.grad_dtype) for shape in shapes]
        first, second = (
            [quantize_tensor(noise(shape).abs(), state) for shape in shapes] for state in call.specs
        )
        return params, grads, first, second

    return Sample(
        (call.specs[0].dtype, call.param_dtype, call.grad_dtype),
        arguments,
        0.07,
        in_place=True,
        options=_STEP,
    )


ADAM_KERNELS = (
    Kernel(
        "triton_adam_step", "adam_step", "flat", "cuda", adam_step, 50, unavailable,
        proven("adam_step", adam_step, _refuses, _sample),
    ),
)  # fmt: skip

"""Checks of the kernel of `adam_step`."""

from __future__ import annotations

from functools import partial

from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16

__all__ = ["CHECKS"]


def _build(first: str, stochastic: bool) -> Build:
    """The kernel `step` for parameters and gradients in bfloat16, as `adam.adam_step` launches it."""
    from ao_kernels.triton.adam import kernel
    from ao_kernels.triton.adam.op import settings

    numbers = ("beta1", "beta2", "rest1", "rest2", "eps", "rate", "root", "keep", "decay", "sign")
    types = {"tensor_ptr": "*i64", "chunk_ptr": "*i32", **dict.fromkeys(numbers, "fp32")}
    chosen = settings(BF16, BF16, first, aligned=True, stochastic=stochastic, assembly=True)
    return Build(
        kernel.step, {**types, "seed": "i32"}, chosen, 90, 4, 1, ("tensor_ptr", "chunk_ptr")
    )


def _check(
    budget: float, first: str = "f8e4m3", present: str = "F2FP", *, stochastic: bool = False
) -> Check:
    """For 32 parameters: at 10 bytes for one, an H200 has 69 instructions for them.

    A turn is over 1024. What is converted are the scales: one for 256 parameters.
    """
    return Check(
        f"sm_90 adam {first} bf16{' stochastic' if stochastic else ''}",
        partial(_build, first, stochastic),
        registers=128,
        shared=1024,
        conversions=2,
        work=1024 / 32,
        budget=budget,
        holding=("LDG",),
        counts={"LDG": 6, "STG": 5},
        present=("MUFU", present),
        absent=("I2F", "LDL", "STL"),
    )


CHECKS = (
    _check(44.0),
    _check(65.0, stochastic=True),
    _check(61.0, "companded8", "PRMT"),
    _check(83.0, "companded8", "PRMT", stochastic=True),
)

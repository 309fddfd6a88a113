"""Checks of the Hadamard transform."""

from __future__ import annotations

from functools import partial

from ao_kernels.triton.hadamard.op import Shape, launch_shape, sign_bits
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, PDL, TYPES

__all__ = ["CHECKS"]


def _shape(block: int) -> Shape:
    shape = launch_shape(block)
    assert isinstance(shape, Shape)
    return shape


def _build(block: int) -> Build:
    """The kernel `transform`, as `op.transform` launches it."""
    from ao_kernels.triton.hadamard import kernel

    shape = _shape(block)
    pointers = dict.fromkeys(("x_ptr", "y_ptr"), TYPES[BF16])
    types = {**pointers, "blocks": "i32", "before": "fp32", "after": "fp32"}
    chosen = shape.constants | {"SIGNS": sign_bits(shape.order, False), "PDL": True}
    return Build(kernel.transform, types, chosen, 90, shape.warps, 1, tuple(pointers))


def _check(budget: float, registers: int, block: int) -> Check:
    """For 128 bytes that are read or written; there is no loop, so all instructions count.

    Not measured on a device. A matrix of Paley's is read once for a block, and takes tensor cores.
    """
    shape = _shape(block)
    held = shape.blocks * shape.padded * shape.power
    multiplied = shape.order > 1
    counts = {} if multiplied else {"LDG": held * BF16.itemsize // (16 * 32 * shape.warps)}
    return Check(
        f"sm_90 hadamard bf16 {shape.order}x{shape.power}",
        partial(_build, block),
        registers=registers,
        shared=4 * held,
        conversions=0,
        work=shape.blocks * shape.order * shape.power * BF16.itemsize * 2 / 128,
        budget=budget,
        holding=(),
        counts=counts,
        anywhere=PDL,
        present=("HMMA",) if multiplied else (),
        absent=("LDL", "STL", "CALL", *(() if multiplied else ("I2F", "HMMA"))),
    )


CHECKS = (_check(22.7, 64, 4096), _check(44.6, 255, 28 * 512))

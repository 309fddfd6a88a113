"""Checks of weights on a trellis."""

from __future__ import annotations

from functools import partial

from ao_kernels.triton.trellis.op import BLOCK_K, BLOCK_N, DENSE_K, RING, WARPS, constants
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check

__all__ = ["CHECKS"]

_POINTERS = {"qdata_ptr": "*i32", "scale_ptr": "*bf16", "table_ptr": "*i8"}


def _dense(bits: int) -> Build:
    """The kernel `dequantize`, as `op.dequantize` launches it."""
    from ao_kernels.triton.trellis import kernel

    pointers = {**_POINTERS, "out_ptr": "*bf16"}
    chosen = constants(bits) | {"BLOCK_K": DENSE_K}
    types = {**pointers, "N": "i32", "K": "i32"}
    return Build(kernel.dequantize, types, chosen, 90, WARPS, 3, (*pointers, "N", "K"))


def _linear(bits: int, rows: int) -> Build:
    """The kernel `linear`, as `op.linear` launches it."""
    from ao_kernels.triton.trellis import kernel

    pointers = {"x_ptr": "*bf16", **_POINTERS, "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    chosen = constants(bits) | {
        "BLOCK_M": rows,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "HAS_BIAS": False,
    }
    types = {**pointers, **dict.fromkeys(("M", "N", "K", "x_stride"), "i32")}
    aligned = (*pointers, "N", "K", "x_stride")
    return Build(kernel.linear, types, chosen, 90, WARPS, 3, aligned)


def _linear_check(bits: int, rows: int, budget: float) -> Check:
    """For 128 bytes of weights; a turn decodes 32 × 64 of them. Not measured on a device.

    Above the 27.6 that memory would wait for: 26 instructions of a warp for 32 weights. As many weights in
    bfloat16 are 16 / bits × 128 bytes.
    """
    return Check(
        f"sm_90 trellis {bits} bits rows {rows}",
        partial(_linear, bits, rows),
        registers=255,
        shared=48 * 1024,
        conversions=2,
        work=BLOCK_N * BLOCK_K * bits / 8 / 128,
        budget=budget,
        holding=("HMMA",),
        absent=("LDL", "STL", "CALL"),
    )


def _dense_check(bits: int, budget: float) -> Check:
    """For 128 bytes of weights; there is no loop."""
    return Check(
        f"sm_90 trellis {bits} bits dense",
        partial(_dense, bits),
        registers=255,
        shared=48 * 1024,
        conversions=1,
        work=RING * DENSE_K * bits / 8 / 128,
        budget=budget,
        holding=(),
        absent=("LDL", "STL", "CALL"),
    )


CHECKS = (_linear_check(2, 16, 430), _linear_check(3, 16, 290), _dense_check(2, 500))

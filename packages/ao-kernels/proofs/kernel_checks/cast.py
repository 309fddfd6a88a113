"""Checks of the casts to float8."""

from __future__ import annotations

from functools import partial

from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, TYPES

__all__ = ["CHECKS"]


def _build(scales: str) -> Build:
    """The kernel `cast` from bfloat16, of the transpose too, as `cast.launch` does."""
    from ao_kernels.triton.cast import kernel
    from ao_kernels.triton.cast.op import WARPS, settings

    chosen = settings("f8e4m3", scales, transposed=True, assembly=True)
    pointers = {
        "x_ptr": TYPES[BF16],
        "found_ptr": "*fp32",
        "found_t_ptr": "*fp32",
        "codes_ptr": f"*{chosen['FORMAT']}",
        "scale_ptr": "*fp32",
        "codes_t_ptr": "*i32",
        "scale_t_ptr": "*fp32",
    }
    sizes = ("M", "N", "words", "blocks", "blocks_t")
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(kernel.cast, types, chosen, 90, WARPS, 1, (*pointers, "M", "N", "words"))


def _check(budget: float, scales: str) -> Check:
    """For 128 bytes that are read or written. A turn is over a tile of 128 × 128.

    Layouts are converted for the transposed codes, and for magnitudes that warps find together.
    """
    blocks = scales == "block"
    loads = 128 * 128 * BF16.itemsize // (16 * 32 * 8)
    return Check(
        f"sm_90 cast f8e4m3 {scales} bf16 and transposed",
        partial(_build, scales),
        registers=168,
        shared=16 * 1024,
        conversions=6 if blocks else 1,
        work=128 * 128 * (BF16.itemsize + 2) / 128,
        budget=budget,
        holding=("F2FP",),
        counts={"F2FP": 64, "LDG": loads + (8 if scales == "row" else 0)},
        absent=("I2F", "LDL", "STL", "CALL", *(() if blocks else ("SHFL",))),
    )


def _build_amax() -> Build:
    """The kernel `amax` of rows in bfloat16, as `cast.launch` does for both casts."""
    from ao_kernels.triton.cast import kernel
    from ao_kernels.triton.cast.op import TILES, WARPS

    pointers = {"x_ptr": "*bf16", "found_ptr": "*i32", "found_t_ptr": "*i32"}
    chosen = {"TILES": 2 * TILES, "SCALES": "row", "TRANSPOSED": True}
    aligned = (*pointers, "M", "N")
    return Build(kernel.amax, {**pointers, "M": "i32", "N": "i32"}, chosen, 90, WARPS, 3, aligned)


def _amax_check(budget: float) -> Check:
    """For 128 bytes that are read. A turn is over 64 × 128; warps find magnitudes together."""
    return Check(
        "sm_90 amax row bf16 and transposed",
        _build_amax,
        registers=64,
        shared=4096,
        conversions=1,
        work=64 * 128 * 2 / 128,
        budget=budget,
        holding=("LDG",),
        counts={"LDG": 4},
        absent=("I2F", "LDL", "STL"),
    )


CHECKS = (
    _check(17.3, "row"),
    _check(26.0, "block"),
    _amax_check(20.0),
)

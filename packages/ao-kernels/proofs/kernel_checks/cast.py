"""Checks of the casts to float8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, TYPES

__all__ = ["CHECKS"]


@dataclass(frozen=True)
class _Cast:
    """A cast as the kernel `cast` is compiled for it."""

    scales: str
    dtype: torch.dtype = BF16
    numbers: str = "f8e4m3"
    transposed: bool = True
    arch: int = 90


def _build(case: _Cast) -> Build:
    """The kernel `cast`, as `cast.launch` does."""
    from ao_kernels.triton.cast import kernel
    from ao_kernels.triton.cast.op import WARPS, settings

    chosen = settings(case.numbers, case.scales, transposed=case.transposed, assembly=True)
    codes = f"*{chosen['FORMAT']}"
    pointers = {
        "x_ptr": TYPES[case.dtype],
        "found_ptr": "*fp32",
        "found_t_ptr": "*fp32",
        "codes_ptr": codes,
        "scale_ptr": "*fp32",
        "codes_t_ptr": "*i32" if case.transposed else codes,
        "scale_t_ptr": "*fp32",
    }
    sizes = ("M", "N", "words", "blocks", "blocks_t")
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(kernel.cast, types, chosen, case.arch, WARPS, 1, (*pointers, "M", "N", "words"))


def _check(budget: float, case: _Cast) -> Check:
    """For 128 bytes that are read or written. A turn is over a tile of 128 × 128.

    Layouts are converted for the transposed codes, and for magnitudes that warps find together.
    """
    width, transposed = case.dtype.itemsize, case.transposed
    moved = width + (2 if transposed else 1)
    conversions = {"block": 6 if transposed else 4}.get(case.scales, 1 if transposed else 0)
    loads = 128 * 128 * width // (16 * 32 * 8)
    # sm_89 converts into the lower half of a word only, and calls what follows the loop
    calls = ("CALL",) if case.arch >= 90 else ()
    packed = 32 if not transposed else 64 if case.arch >= 90 else 96
    return Check(
        f"sm_{case.arch} cast {case.numbers} {case.scales} {TYPES[case.dtype][1:]}"
        f"{' and transposed' if transposed else ''}",
        partial(_build, case),
        registers=168 if width == 2 else 200,
        shared=16 * 1024 if transposed else 1024,
        conversions=conversions,
        work=128 * 128 * moved / 128,
        budget=budget,
        holding=("F2FP",),
        counts={"F2FP": packed, "LDG": loads + (8 if case.scales == "row" else 0)},
        absent=("I2F", "LDL", "STL", *calls, *(() if case.scales == "block" else ("SHFL",))),
    )


def _build_amax(scales: str, arch: int) -> Build:
    """The kernel `amax` in bfloat16, as `cast.launch` does for both casts."""
    from ao_kernels.triton.cast import kernel
    from ao_kernels.triton.cast.op import TILES, WARPS

    pointers = {"x_ptr": "*bf16", "found_ptr": "*i32", "found_t_ptr": "*i32"}
    chosen = {"TILES": 2 * TILES, "SCALES": scales, "TRANSPOSED": True}
    aligned = (*pointers, "M", "N")
    return Build(kernel.amax, {**pointers, "M": "i32", "N": "i32"}, chosen, arch, WARPS, 3, aligned)


def _amax_gate(budget: float, scales: str, arch: int) -> Check:
    """For 128 bytes that are read. A turn is over 64 × 128; warps find magnitudes together."""
    return Check(
        f"sm_{arch} amax {scales} bf16 and transposed",
        partial(_build_amax, scales, arch),
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
    _check(17.3, _Cast("row")),
    _check(26.0, _Cast("block")),
    _amax_gate(20.0, "row", 90),
)

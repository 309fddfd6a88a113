"""Checks of blocks rounded to MX and NVFP4 in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, TYPES

__all__ = ["CHECKS"]


@dataclass(frozen=True)
class _Blocks:
    """A format as the kernel `round_rows` is compiled for it."""

    numbers: str = "f4e2m1"
    block: int = 32
    scales: str = "e8m0"
    dtype: torch.dtype = BF16
    even: bool = True
    arch: int = 90


def _build(case: _Blocks) -> Build:
    """As `round_blocks` launches it."""
    from ao_kernels.triton.fake_quantize import kernel
    from ao_kernels.triton.fake_quantize.op import HELD, WARPS, settings

    x = TYPES[case.dtype]
    pointers = {"x_ptr": x, "found_ptr": "*fp32", "out_ptr": x}
    chosen = {
        "HELD": HELD // case.block,
        "BLOCK": case.block,
        "EVEN": case.even,
        **settings(case.numbers, case.scales, "floor", assembly=True),
    }
    types = {**pointers, **dict.fromkeys(("blocks", "K", "a_row"), "i32")}
    return Build(kernel.round_rows, types, chosen, case.arch, WARPS, 1, tuple(pointers))


def _check(budget: float, case: _Blocks) -> Check:
    """For 128 bytes that are read or written; there is no loop, so all instructions count."""
    from ao_kernels.triton.fake_quantize.op import HELD, WARPS

    width = case.dtype.itemsize
    ragged = "" if case.even else " ragged"
    loads = HELD * (width if case.even else 16) // (16 * 32 * WARPS)  # ragged: one by one
    # which row a block is in takes one division, by way of floats
    divides = () if case.even else ("I2F",)
    return Check(
        f"sm_{case.arch} {case.numbers} b{case.block} {case.scales} {TYPES[case.dtype][1:]}{ragged}",
        partial(_build, case),
        registers=96 if case.even else 192,
        shared=2048,
        work=HELD * 2 * width / 128,
        budget=budget,
        holding=(),
        counts={"LDG": loads + (case.scales == "nested")},
        present=divides,
        absent=("LDL", "STL", "CALL", *(() if divides else ("I2F",))),
    )


CHECKS = (
    _check(15.6, _Blocks()),
    _check(24.2, _Blocks("f4e2m1", 16, "nested")),
)

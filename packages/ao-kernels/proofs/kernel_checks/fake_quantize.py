"""Checks of blocks rounded to MX and NVFP4 in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ao_kernels.triton.fake_quantize.op import HELD, WARPS, settings
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, TYPES

__all__ = ["CHECKS"]


@dataclass(frozen=True)
class _Blocks:
    """Blocks of f4e2m1 as the kernel `round_rows` is compiled for them."""

    block: int
    scales: str


def _build(case: _Blocks) -> Build:
    """As `round_blocks` launches it."""
    from ao_kernels.triton.fake_quantize import kernel

    pointers = {"x_ptr": TYPES[BF16], "found_ptr": "*fp32", "out_ptr": TYPES[BF16]}
    chosen = {
        "HELD": HELD // case.block,
        "BLOCK": case.block,
        "EVEN": True,
        **settings("f4e2m1", case.scales, "floor", assembly=True),
    }
    types = {**pointers, **dict.fromkeys(("blocks", "K", "a_row"), "i32")}
    return Build(kernel.round_rows, types, chosen, 90, WARPS, 1, tuple(pointers))


def _check(budget: float, case: _Blocks) -> Check:
    """For 128 bytes that are read or written; there is no loop, so all instructions count."""
    width = BF16.itemsize
    return Check(
        f"sm_90 f4e2m1 b{case.block} {case.scales} bf16",
        partial(_build, case),
        registers=96,
        shared=2048,
        work=HELD * 2 * width / 128,
        budget=budget,
        holding=(),
        counts={"LDG": HELD * width // (16 * 32 * WARPS) + (case.scales == "nested")},
        absent=("LDL", "STL", "CALL", "I2F"),
    )


CHECKS = (_check(15.6, _Blocks(32, "e8m0")), _check(24.2, _Blocks(16, "nested")))

"""Checks of the rows that are computed and quantized in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ao_kernels.triton.rows.op import launch_shape, settings
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, PDL, TYPES

__all__ = ["CHECKS"]


@dataclass(frozen=True)
class _Rows:
    """Rows of k numbers in bfloat16 as the kernel `quantize_rows` is compiled for them, to f8e4m3."""

    source: str = "plain"
    k: int = 4096


def _build(case: _Rows) -> Build:
    """As `rows.row_codes` launches it."""
    from ao_kernels.triton.rows import kernel

    held, cols, warps = launch_shape(case.k)
    chosen = {
        "ROWS": held,
        "COLS": cols,
        **settings("f8e4m3", case.source, BF16, assembly=True),
        "PDL": True,
    }
    pointers = {
        "x_ptr": TYPES[BF16],
        "other_ptr": TYPES[BF16],
        "codes_ptr": f"*{chosen['FORMAT']}",
        "scale_ptr": "*fp32",
        "zero_ptr": "*u8",
    }
    sizes = ["M", "K", "stride_x", "stride_other"]
    if case.source != "silu_mul":
        chosen["stride_other"] = 1 if case.source == "rms_norm" else 0
        sizes.pop()
    types = {**pointers, **dict.fromkeys(sizes, "i32"), "eps": "fp32"}
    return Build(
        kernel.quantize_rows, types, chosen, 90, warps, 1,
        (*(name for name in pointers if name != "zero_ptr"), *sizes[1:]),
    )  # fmt: skip


def _check(budget: float, registers: int, case: _Rows) -> Check:
    """For 128 bytes that are read or written; there is no loop, so all instructions count."""
    held, cols, warps = launch_shape(case.k)
    width = BF16.itemsize
    read = width if case.source == "plain" else 2 * width
    # weights of RMSNorm come from the cache
    moved = width + 1 if case.source == "rms_norm" else read + 1
    return Check(
        f"sm_90 rows {case.source} f8e4m3 bf16 K {case.k}",
        partial(_build, case),
        registers=registers,
        shared=1024,
        work=held * cols * moved / 128,
        budget=budget,
        holding=(),
        counts={"LDG": held * cols * read // (16 * 32 * warps)},
        anywhere=PDL,
        absent=("I2F", "LDL", "STL", "CALL"),
    )


CHECKS = (
    _check(15.3, 48, _Rows()),
    _check(27.8, 64, _Rows("rms_norm")),
    _check(25.5, 64, _Rows("silu_mul", k=14336)),
)

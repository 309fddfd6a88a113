"""Checks of the matmuls of operands in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ao_kernels.triton.scaled_mm.launch import BLOCK_K, TILE_CONFIGS, TileConfig, constants
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, PDL, SHARED, TYPES

__all__ = ["CHECKS"]

_LARGE, _MIDDLE, _, _SMALL = TILE_CONFIGS
_SQUARE = ("block", "square")
#: multiplications of 8 bits that the tensor cores of a processor of sm_90 do in a cycle
_MACS = 4096
_CODES = {"e4m3": "fp8e4nv", "int8": "i8"}


@dataclass(frozen=True)
class _Matmul:
    """A matmul as the kernel `matmul` is compiled for it, with a bias in bfloat16."""

    config: TileConfig
    #: of both operands
    numbers: str = "e4m3"
    kinds: tuple[str, str] = ("row", "row")
    #: 0: no experts; else a power of two
    groups: int = 0

    @property
    def name(self) -> str:
        grouped = f" experts below {self.groups}" if self.groups else ""
        return (
            f"{self.numbers} × {self.numbers} scales {' × '.join(self.kinds)}"
            f"{grouped} bf16 tile {self.config.block_m} × {self.config.block_n}"
        )


def _build(case: _Matmul) -> Build:
    """The kernel `matmul`, as `scaled.launch` does for sizes that are multiples of 16."""
    from ao_kernels.triton.scaled_mm import kernel

    config, integers, code = case.config, case.numbers == "int8", _CODES[case.numbers]
    promote = not integers and case.kinds[0] == "block"
    operands = {
        name: f"tensordesc<{code}[{rows}, {BLOCK_K}]>"
        for name, rows in (("a", config.block_m), ("b", config.block_n))
    }
    pointers = {
        "a_scale_ptr": "*fp32",
        "b_scale_ptr": "*fp32",
        "zero_ptr": "*fp32",
        "sums_ptr": "*fp32",
        "bias_ptr": TYPES[BF16],
        "offs_ptr": "*i32" if case.groups else "*fp32",
        "out_ptr": TYPES[BF16],
    }
    sizes = ["M", "N", "K", "stride_a", "stride_b", "m_tiles", "experts"]
    chosen = constants(
        config,
        case.kinds,
        integers=integers,
        promote=promote,
        bias=True,
        groups=case.groups,
        pdl=True,
    )
    if not case.groups:
        chosen["experts"] = 1
        sizes.pop()
    return Build(
        kernel.matmul,
        {**operands, **pointers, **dict.fromkeys(sizes, "i32")},
        chosen,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=("a_scale_ptr", "b_scale_ptr", "out_ptr", "N", "K", "stride_a", "stride_b"),
    )


def _check(budget: float, registers: int, case: _Matmul) -> Check:
    """For a cycle of the tensor cores: the four schedulers of a processor issue 4 instructions in it.

    The smallest tiles are for few rows, and wait for weights: theirs are for 128 bytes of those.
    """
    config, build = case.config, partial(_build, case)
    shared = min(SHARED, (config.block_m + config.block_n) * BLOCK_K * config.num_stages + 1024)
    integers = case.numbers == "int8"
    # 64 rows × 32 columns of a for a warp group; of integers, 128 columns of the result at most
    count = config.block_m * BLOCK_K // (64 * 32) // (config.num_warps // 4)
    halves = config.block_n // 128 if integers and config.block_n > 128 else 1
    counts = {"IGMMA" if integers else "QGMMA": count * halves}
    return Check(
        case.name,
        build,
        registers,
        shared,
        work=config.block_n * BLOCK_K * (1 / 128 if config == _SMALL else config.block_m / _MACS),
        budget=budget,
        holding=tuple(counts),
        counts=counts,
        present=("UTMALDG",),
        anywhere=PDL,
        absent=("I2F", "LDL", "STL"),
    )


CHECKS = (
    _check(0.77, 232, _Matmul(_LARGE)),
    _check(11.8, 64, _Matmul(_SMALL)),
    _check(3.1, 168, _Matmul(_MIDDLE, kinds=_SQUARE)),
    _check(0.85, 232, _Matmul(_LARGE, "int8")),
    _check(1.1, 232, _Matmul(_LARGE, groups=16)),
)

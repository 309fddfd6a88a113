"""Checks of the matmuls of activations in 8 bits with weights in 4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ao_kernels.triton.shared.tile_config import TileConfig
from ao_kernels.triton.shared.tiling import BLOCK_N
from ao_kernels.triton.w4a8.layout import PLANE_K, PLANES, stored, tiling
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, FP32, REGISTERS, SHARED, TYPES

__all__ = ["CHECKS", "SLOW_CHECKS"]

_RULES = _SMALL, _MIDDLE, _LARGE, _MANY = (
    TileConfig(16, 4, 4),
    TileConfig(32, 4, 4),
    TileConfig(64, 8, 3),
    TileConfig(128, 8, 3),
)
#: those with which more blocks share a processor: `launch.launch_configs_around`
_FEWER = tuple(config._replace(num_stages=config.num_stages - 1) for config in _RULES)
#: a weight whose tiles are all full, and one whose last tiles are not
_EVEN, _RAGGED = (4096, 4096), (4000, 4112)
_ROW = _EVEN[1]


@dataclass(frozen=True)
class _Matmul:
    """A matmul as the kernel `linear` is compiled for it, with a bias."""

    act: str
    config: TileConfig
    group: int
    zero_dtype: torch.dtype | None = None
    scale_dtype: torch.dtype = BF16
    dtype: torch.dtype = BF16
    shape: tuple[int, int] = _EVEN
    arch: int = 90
    splits: int = 4

    @property
    def name(self) -> str:
        zero_point = "" if self.zero_dtype is None else f" zero {TYPES[self.zero_dtype][1:]}"
        ragged = "" if self.shape == _EVEN else " ragged"
        stages = "" if self.config in _RULES else f" stages {self.config.num_stages}"
        whole = " no splits" if self.splits == 1 else ""
        return (
            f"sm_{self.arch} {self.act} × int4 g{self.group} scale {TYPES[self.scale_dtype][1:]}{zero_point} "
            f"rows {self.config.block_m} to {TYPES[self.dtype][1:]}{ragged}{stages}"
            f"{whole}"
        )


def _build(case: _Matmul) -> Build:
    """The kernel `linear`, as `act8` launches it."""
    from ao_kernels.triton.w4a8 import kernel
    from ao_kernels.triton.w4a8.launch import constants

    (n, k), scale, out = case.shape, TYPES[case.scale_dtype], TYPES[case.dtype]
    how = stored("int4" if case.zero_dtype is None else "uint4", integers=case.act != "f8e4m3")
    pointers = {
        "x_ptr": "*fp8e4nv" if case.act == "f8e4m3" else "*i8",
        "x_scale_ptr": "*fp32",
        "x_zero_ptr": "*u8" if case.act == "uint8" else "*fp32",
        "x_sums_ptr": "*fp32" if case.zero_dtype is not None else out,
        "w_ptr": "*i32",
        "scale_ptr": scale,
        "zero_ptr": scale if case.zero_dtype is None else TYPES[case.zero_dtype],
        "row_sums_ptr": "*fp32" if case.act == "uint8" else scale,
        "bias_ptr": out,
        "out_ptr": out,
        "partial_ptr": "*fp32",
        "semaphore_ptr": "*i32",
    }
    sizes = ("M", "N", "K", "stride_x", "k_tiles", "tiles_per_split")
    return Build(
        kernel.linear,
        {**pointers, **dict.fromkeys(sizes, "i32")},
        constants(
            how, tiling(n, k, case.group), case.config, case.splits, case.scale_dtype, divmod(case.arch, 10),
            zero_point=case.zero_dtype is not None, x_zero=case.act == "uint8", bias=True,
            pdl=case.arch >= 90,
        ),
        case.arch,
        case.config.num_warps,
        case.config.num_stages,
        aligned=(*pointers, *(("N",) if n % 16 == 0 else ()), "K", "stride_x"),
    )  # fmt: skip


def _check(budget: float, case: _Matmul) -> Check:
    """For 128 bytes of weights: with `_MANY` tensor cores are busy 8 cycles with them, of 4 instructions."""
    build, warps, integers = partial(_build, case), case.config.num_warps, case.act != "f8e4m3"
    # the matmul of zero points, after the loop that is counted, has a loop of its own
    conversions = 0 if case.zero_dtype is None or case.group == _ROW else 2
    if case.arch >= 100 and (not integers or conversions):
        # tensor memory: another loop, for which no budget is known
        return Check(case.name, build, REGISTERS, SHARED[case.arch], conversions=9)
    numbers = BLOCK_N * PLANES * PLANE_K
    if case.arch == 90:
        # 64 × 32 weights a warp group and instruction
        counts = {"IGMMA" if integers else "QGMMA": numbers // (64 * 32 * (warps // 4))}
    else:
        # 16 × 32 weights a warp, and 8 rows of activations
        mma = numbers * case.config.block_m // (16 * 32 * 8 * warps)
        counts = {"IMMA" if integers else "QMMA": mma}
    return Check(
        case.name,
        build,
        REGISTERS,
        SHARED[case.arch],
        conversions,
        work=numbers / 2 / 128,
        budget=budget,
        counts=counts,
        present=("LDGSTS", "LOP3"),
        # to launch the next kernel, to bring weights nearer, and to wait for the one before
        anywhere=("PREEXIT", "CCTL", "ACQBULK") if case.arch == 90 else (),
    )


def _fits(config: TileConfig, splits: int, zero_dtype: torch.dtype | None) -> Check:
    """Neither spills nor takes more than there is: for settings that measuring may choose."""
    case = _Matmul("uint8", config, 128, zero_dtype, splits=splits)
    conversions = 0 if zero_dtype is None else 2
    return Check(case.name, partial(_build, case), REGISTERS, SHARED[case.arch], conversions)


CHECKS = (
    _check(9.3, _Matmul("uint8", _SMALL, 128)),
    _check(18.0, _Matmul("uint8", _SMALL, 32)),
    _check(12.4, _Matmul("int8", _SMALL, 64, torch.uint8)),
    _check(14.4, _Matmul("f8e4m3", _SMALL, 128)),
    _check(27.6, _Matmul("uint8", _MANY, 128)),
    _check(21.0, _Matmul("uint8", _SMALL, 32, arch=80)),
    _check(15.0, _Matmul("uint8", _SMALL, 32, arch=100)),
)
SLOW_CHECKS = (
    _check(9.1, _Matmul("int8", _SMALL, 128, scale_dtype=FP32, dtype=FP32)),
    _check(12.2, _Matmul("int8", _SMALL, 64)),
    _check(7.7, _Matmul("int8", _SMALL, 256)),
    _check(6.4, _Matmul("uint8", _SMALL, _ROW)),
    _check(9.8, _Matmul("uint8", _SMALL, 128, shape=_RAGGED)),
    _check(18.2, _Matmul("uint8", _SMALL, 32, BF16)),
    _check(6.4, _Matmul("int8", _SMALL, _ROW, torch.uint8)),
    _check(20.2, _Matmul("f8e4m3", _SMALL, 32)),
    _check(13.1, _Matmul("f8e4m3", _SMALL, _ROW)),
    _check(11.5, _Matmul("f8e4m3", _SMALL, 128, torch.uint8)),
    _check(11.9, _Matmul("uint8", _MIDDLE, 128)),
    _check(26.5, _Matmul("uint8", _MIDDLE, 32)),
    _check(18.8, _Matmul("uint8", _LARGE, 128)),
    _check(46.8, _Matmul("uint8", _LARGE, 32)),
    _check(79.0, _Matmul("uint8", _MANY, 32)),
    _check(11.5, _Matmul("uint8", _MANY, _ROW)),
    _check(27.5, _Matmul("int8", _LARGE, 64, BF16)),
    _check(47.0, _Matmul("uint8", _LARGE, 32, torch.uint8)),
    _check(25.7, _Matmul("f8e4m3", _MANY, 128)),
    _check(36.6, _Matmul("f8e4m3", _LARGE, 32)),
    _check(12.3, _Matmul("uint8", _SMALL, 128, arch=80)),
    _check(63.5, _Matmul("uint8", _MANY, 128, arch=80)),
    _check(47.0, _Matmul("int8", _LARGE, 64, torch.uint8, arch=80)),
    _check(17.0, _Matmul("uint8", _MIDDLE, 128, arch=89)),
    _check(16.6, _Matmul("f8e4m3", _SMALL, 128, arch=89)),
    _check(87.5, _Matmul("uint8", _MANY, 32, arch=89)),
    _check(10.8, _Matmul("uint8", _SMALL, 128, arch=100)),
    _check(51.0, _Matmul("uint8", _MANY, 128, arch=100)),
    _check(0, _Matmul("int8", _SMALL, 128, BF16, arch=100)),
    _check(0, _Matmul("f8e4m3", _SMALL, 128, arch=100)),
    _check(0, _Matmul("f8e4m3", _MANY, 128, arch=100)),
    *(_fits(config, 4, None) for config in _FEWER),
    *(_fits(config, 1, None) for config in (*_RULES, *_FEWER)),
    *(_fits(config, 4, torch.uint8) for config in (_SMALL, _MIDDLE, _LARGE, *_FEWER[:-1])),
    *(_fits(config, 1, torch.uint8) for config in (_SMALL, _MIDDLE, _LARGE, *_FEWER[:-1])),
)

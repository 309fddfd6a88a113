"""Checks of the matmuls of activations in 8 bits with weights in 4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ao_kernels.triton.shared.tile_config import TileConfig
from ao_kernels.triton.shared.tiling import BLOCK_N
from ao_kernels.triton.w4a8.launch import TILE_CONFIGS, constants
from ao_kernels.triton.w4a8.layout import PLANE_K, PLANES, stored, tiling
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, PDL, REGISTERS, SHARED, TYPES

__all__ = ["CHECKS"]

_SMALL, _MIDDLE, _LARGE, _MANY = TILE_CONFIGS
_EVEN = (4096, 4096)


@dataclass(frozen=True)
class _Matmul:
    """A matmul as the kernel `linear` is compiled for it, with a bias, in splits of K."""

    act: str
    config: TileConfig
    group: int
    zero_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        zero_point = "" if self.zero_dtype is None else " zero"
        return f"{self.act} × int4 g{self.group}{zero_point} rows {self.config.block_m}"


def _build(case: _Matmul) -> Build:
    """The kernel `linear`, as `act8` launches it."""
    from ao_kernels.triton.w4a8 import kernel

    (n, k), scale, out = _EVEN, TYPES[BF16], TYPES[BF16]
    how = stored("int4" if case.zero_dtype is None else "uint4", integers=case.act != "f8e4m3")
    pointers = {
        "x_ptr": "*fp8e4nv" if case.act == "f8e4m3" else "*i8",
        "x_scale_ptr": "*fp32",
        "x_zero_ptr": "*u8" if case.act == "uint8" else "*fp32",
        "w_ptr": "*i32",
        "scale_ptr": scale,
        "zero_ptr": scale if case.zero_dtype is None else TYPES[case.zero_dtype],
        "row_sums_ptr": "*fp32" if case.act == "uint8" else scale,
        "bias_ptr": out,
        "out_ptr": out,
        "partial_ptr": "*fp32",
        "semaphore_ptr": "*i32",
    }
    sizes = ("M", "N", "K", "stride_x", "k_tiles", "tiles_per_split", "splits")
    return Build(
        kernel.linear,
        {**pointers, **dict.fromkeys(sizes, "i32")},
        constants(
            how, tiling(n, k, case.group), case.config, 4, BF16, (9, 0), zero_dtype=case.zero_dtype,
            x_zero=case.act == "uint8", bias=True, pdl=True,
        ),
        num_warps=case.config.num_warps,
        num_stages=case.config.num_stages,
        aligned=(*(name for name in pointers if name not in _ANYWHERE), "N", "K", "stride_x"),
    )  # fmt: skip


def _check(budget: float, case: _Matmul) -> Check:
    """For 128 bytes of weights: with `_MANY` tensor cores are busy 8 cycles with them, of 4 instructions."""
    # 64 × 32 weights a warp group and instruction; sums of activations for zero points are as many again
    weights = BLOCK_N * PLANES * PLANE_K
    count = (
        weights // (64 * 32 * (case.config.num_warps // 4)) * (1 if case.zero_dtype is None else 2)
    )
    return Check(
        case.name,
        partial(_build, case),
        REGISTERS,
        SHARED,
        work=weights / 2 / 128,
        budget=budget,
        counts={"QGMMA" if case.act == "f8e4m3" else "IGMMA": count},
        present=("LDGSTS", "LOP3"),
        anywhere=(*PDL, "CCTL"),  # it brings weights nearer meanwhile
    )


#: what may begin anywhere: the kernels' `do_not_specialize_on_alignment`
_ANYWHERE = ("x_scale_ptr", "x_zero_ptr", "bias_ptr", "semaphore_ptr")
CHECKS = (
    _check(10.5, _Matmul("uint8", _SMALL, 128)),
    _check(21.9, _Matmul("int8", _SMALL, 64, torch.uint8)),
    _check(15.9, _Matmul("f8e4m3", _SMALL, 128)),
    _check(30.4, _Matmul("uint8", _MANY, 128)),
)

"""Checks of the matmuls with weights in planes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ao_core.ext import registry
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.tile_config import TileConfig
from ao_kernels.triton.shared.tiling import BLOCK_N, Tiling
from ao_kernels.triton.weight_only.formats import Format, known
from ao_kernels.triton.weight_only.launch import (
    TILE_CONFIGS,
    constants,
    prefetch_options,
    stages_of,
)
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.scales import KINDS
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, FP16, FP32, REGISTERS, SHARED, TYPES

__all__ = ["CHECKS", "SLOW_CHECKS"]

#: a weight whose tiles are all full, and one whose last tiles are not
_EVEN, _RAGGED = (4096, 4096), (4000, 4112)
_SMALL, _MIDDLE, _LARGE = TILE_CONFIGS
_ROW = _EVEN[1]


@dataclass(frozen=True)
class _Matmul:
    """A matmul as the kernel `linear` is compiled for it, with a bias."""

    numbers: str
    config: TileConfig
    group: int
    x_dtype: torch.dtype = BF16
    scale_dtype: torch.dtype = BF16
    zero_dtype: torch.dtype | None = None
    shape: tuple[int, int] = _EVEN
    arch: int = 90
    sparse: bool = False
    global_scale: bool = False
    splits: int = 4
    #: 0: one weight
    experts: int = 0

    @property
    def format(self) -> Format:
        return known(registry.dtypes.get(self.numbers), sparse=self.sparse)

    @property
    def tiles(self) -> Tiling:
        return tiling(*self.shape, self.group, self.format)

    @property
    def name(self) -> str:
        zero_point = ""
        if self.zero_dtype is not None:
            zero_point = f" zero {ELEMENTS.get(self.zero_dtype, 'u8')}"
        ragged = "" if self.shape == _EVEN else " ragged"
        kept = " 2:4" if self.sparse else ""
        scale = KINDS.get(self.scale_dtype) or TYPES[self.scale_dtype][1:]
        twice = " twice" if self.global_scale else ""
        stages = "" if self.config in TILE_CONFIGS else f" stages {self.config.num_stages}"
        whole = " no splits" if self.splits == 1 else ""
        of = f" of {self.experts} experts" if self.experts else ""
        return (
            f"sm_{self.arch} {self.numbers}{kept} g{self.group} {ELEMENTS[self.x_dtype]} scale "
            f"{scale}{twice}{zero_point} rows {self.config.block_m}{ragged}{stages}{whole}{of}"
        )


def _build(case: _Matmul) -> Build:
    """The kernel `linear`, as `ops` launches it, and for experts that of `experts`."""
    from ao_kernels.triton.weight_only import kernel, kernel_experts
    from ao_kernels.triton.weight_only.op_experts import groups_of

    n, k = case.shape
    x, scale = TYPES[case.x_dtype], TYPES[case.scale_dtype]
    pointers = {
        "x_ptr": x,
        "w_ptr": "*i16",
        "scale_ptr": scale,
        "global_scale_ptr": "*fp32" if case.global_scale else scale,
        "zero_ptr": scale if case.zero_dtype is None else TYPES[case.zero_dtype],
        "table_ptr": "*i32",
        "sums_ptr": x if case.zero_dtype is None else "*fp32",
        "offs_ptr" if case.experts else "bias_ptr": "*i32" if case.experts else x,
        "out_ptr": x,
        "partial_ptr": "*fp32",
        "semaphore_ptr": "*i32",
    }
    sizes: tuple[str, ...] = (
        "M",
        "N",
        "K",
        "stride_x",
        "stride_sums",
        "k_tiles",
        "tiles_per_split",
    )
    sized, pdl = {"N": n, "K": k, "stride_x": k, "stride_sums": 16}, case.arch >= 90
    own = prefetch_options(case.config, pdl=pdl)
    if case.experts:
        sizes, own = (*sizes, "experts"), {"GROUPS": groups_of(case.experts), "PDL": pdl}
    return Build(
        kernel_experts.linear if case.experts else kernel.linear,
        {**pointers, **dict.fromkeys(sizes, "i32")},
        constants(
            case.format, case.tiles, case.config, case.splits,
            case.x_dtype, case.scale_dtype, case.zero_dtype, bias=not case.experts,
            global_scale=case.global_scale, sm80=case.arch < 89,
        ) | own,
        case.arch,
        case.config.num_warps,
        stages_of(case.format, case.tiles, case.config, SHARED[case.arch]),
        aligned=(*pointers, *(name for name, size in sized.items() if size % 16 == 0)),
    )  # fmt: skip


def _check(budget: float, case: _Matmul) -> Check:
    """For 128 bytes of weights."""
    build = partial(_build, case)
    if case.arch >= 100:
        # tensor memory: another loop, for which no budget is known
        return Check(case.name, build, REGISTERS, SHARED[case.arch])
    tiles, warps = case.tiles, case.config.num_warps
    words = BLOCK_N * tiles.plane_k
    # 64 × 16 weights a warp group and instruction; before, 16 × 16 weights a warp and 8 columns
    hgmma = tiles.planes * words // (64 * 16 * (warps // 4))
    # to launch the next kernel, to bring known weights nearer, and to wait for the one before
    pdl = ("PREEXIT", "ACQBULK") if case.experts else ("PREEXIT", "CCTL", "ACQBULK")
    hmma = tiles.planes * words * case.config.block_m // (16 * 16 * 8 * warps)
    return Check(
        case.name,
        build,
        REGISTERS,
        SHARED[case.arch],
        work=words * 2 * case.format.words / 128,
        budget=budget,
        counts={"HGMMA": hgmma} if case.arch == 90 else {"HMMA": hmma},
        present=("LDGSTS", "LOP3"),
        anywhere=pdl if case.arch == 90 else (),
    )


def _fits(numbers: str, config: TileConfig, splits: int, arch: int = 90) -> Check:
    """Neither spills nor takes more than there is: for settings that measuring may choose."""
    group, scale, zero_point = _USUAL[numbers]
    sparse = numbers.endswith(" 2:4")
    case = _Matmul(
        numbers.removesuffix(" 2:4"), config, group, scale_dtype=scale, zero_dtype=zero_point, arch=arch,
        sparse=sparse, splits=splits,
    )  # fmt: skip
    return Check(case.name, partial(_build, case), REGISTERS, SHARED[arch])


def _build_embedding(numbers: str, arch: int) -> Build:
    """The kernel `embedding` for groups of 64 and zero points, as `ops` launches it."""
    from ao_kernels.triton.weight_only import kernel_dequantize
    from ao_kernels.triton.weight_only.op import IDS

    (n, k), fmt = _EVEN, known(registry.dtypes.get(numbers))
    tiles = tiling(n, k, 64, fmt)
    pointers = {
        "ids_ptr": "*i64",
        "w_ptr": "*i16",
        "scale_ptr": "*bf16",
        "global_scale_ptr": "*bf16",
        "zero_ptr": "*bf16",
        "table_ptr": "*i32",
        "out_ptr": "*bf16",
    }
    sizes = ("count", "N", "K", "k_tiles")
    chosen = {
        "IDS": IDS,
        "BLOCK_N": BLOCK_N,
        "WORDS": fmt.words,
        "PLANES": tiles.planes,
        "PLANE_K": tiles.plane_k,
        "PLANES_PER_GROUP": tiles.planes_per_group,
        "ORDER": fmt.order,
        "SPARSE": fmt.sparse,
        "SCALE": None,
        "HAS_GLOBAL_SCALE": False,
        "HAS_ZERO": fmt.offset != 0,
    }
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(kernel_dequantize.embedding, types, chosen, arch, aligned=(*pointers, "N", "K"))


def _embedding_gate(numbers: str, arch: int) -> Check:
    """Neither spills nor takes shared memory for more than what is beside the codes."""
    name = f"sm_{arch} embedding {numbers} g64"
    return Check(name, partial(_build_embedding, numbers, arch), registers=64, shared=4096)


_E8M0, _E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn

#: numbers as checks name them → a group, and dtypes of scales and zero points: those with many registers
_USUAL: dict[str, tuple[int, torch.dtype, torch.dtype | None]] = {
    "int4": (128, BF16, None),
    "int4 2:4": (_ROW, BF16, None),
    "uint4": (64, BF16, BF16),
    "nf4": (64, BF16, None),
    "int8": (_ROW, FP32, None),
    "f8e4m3": (_ROW, FP32, None),
    "f4e2m1": (32, _E8M0, None),
}
#: those with which more blocks share a processor: `launch.launch_configs_around`
_FEWER = tuple(config._replace(num_stages=config.num_stages - 1) for config in TILE_CONFIGS)
_SETTINGS = (
    *(
        _fits(numbers, config, splits)
        for config in (*TILE_CONFIGS, *_FEWER)
        for splits in (1, 4)
        for numbers in _USUAL
    ),
    *(_fits("int4", config, 4, arch) for config in _FEWER for arch in (80, 89, 100)),
)
CHECKS = (
    _embedding_gate("uint4", 90),
    _check(17.5, _Matmul("int4", _SMALL, 128)),
    _check(15.5, _Matmul("int4", _SMALL, 128, FP16, FP16)),
    _check(19.2, _Matmul("int4", _SMALL, 64)),
    _check(19.7, _Matmul("uint4", _SMALL, 128, zero_dtype=torch.uint8)),
    _check(23.5, _Matmul("uint4", _SMALL, 64, zero_dtype=BF16)),
    _check(24.6, _Matmul("int4", _SMALL, 32)),
    _check(16.2, _Matmul("int4", _SMALL, _ROW)),
    _check(19.1, _Matmul("int4", _MIDDLE, 128)),
    _check(25.0, _Matmul("int4", _LARGE, 128)),
    _check(17.5, _Matmul("int4", _SMALL, 128, arch=80)),
    _check(17.5, _Matmul("int4", _SMALL, 128, arch=89)),
    _check(0, _Matmul("int4", _SMALL, 128, arch=100)),
    _check(17.5, _Matmul("int4", _FEWER[0], 128)),
    _check(18.4, _Matmul("int4", _SMALL, 128, shape=_RAGGED)),
    _check(29.5, _Matmul("nf4", _SMALL, 64)),
    _check(10.8, _Matmul("int8", _SMALL, _ROW, scale_dtype=FP32)),
    _check(8.8, _Matmul("int8", _SMALL, _ROW, FP16, FP32)),
    _check(12.8, _Matmul("f8e4m3", _SMALL, _ROW, scale_dtype=FP32)),
    _check(29.6, _Matmul("int2", _SMALL, 128)),
    _check(22.1, _Matmul("int3", _SMALL, 128)),
    _check(20.7, _Matmul("f6e3m2", _SMALL, 128)),
    _check(28.4, _Matmul("f4e2m1", _SMALL, 32, scale_dtype=_E8M0)),
    _check(37.5, _Matmul("f4e2m1", _SMALL, 16, scale_dtype=_E4M3, global_scale=True)),
    _check(28.4, _Matmul("int4", _SMALL, 128, sparse=True)),
    _check(34.4, _Matmul("int4", _SMALL, 128, arch=80, sparse=True)),
    _check(18.1, _Matmul("int4", _SMALL, 128, experts=8)),
    _check(19.8, _Matmul("uint4", _SMALL, 128, zero_dtype=torch.uint8, experts=128)),
)
_CHOSEN = (
    _embedding_gate("nf4", 90),
    _embedding_gate("uint4", 80),
    _embedding_gate("int8", 100),
    _embedding_gate("uint3", 90),
    _embedding_gate("uint7", 90),
    _check(17.5, _Matmul("int4", _SMALL, 128, scale_dtype=FP32)),
    _check(17.2, _Matmul("int4", _SMALL, 256)),
    _check(18.0, _Matmul("int4", _SMALL, 64, FP16, FP16)),
    _check(33.0, _Matmul("uint4", _SMALL, 32, zero_dtype=torch.uint8)),
    _check(16.2, _Matmul("uint4", _SMALL, _ROW, zero_dtype=torch.uint8)),
    _check(22.5, _Matmul("uint4", _MIDDLE, 128, zero_dtype=torch.uint8)),
    _check(31.4, _Matmul("uint4", _LARGE, 128, zero_dtype=torch.uint8)),
    _check(42.3, _Matmul("uint4", _LARGE, 64, zero_dtype=BF16)),
    _check(29.5, _Matmul("int4", _MIDDLE, 32)),
    _check(42.5, _Matmul("int4", _LARGE, 32)),
    _check(28.0, _Matmul("nf4", _SMALL, 128)),
    _check(29.5, _Matmul("nf4", _SMALL, 64, FP16, FP16)),
    _check(39.7, _Matmul("nf4", _LARGE, 64)),
    _check(12.8, _Matmul("f8e4m3", _SMALL, _ROW, FP16, FP32)),
    _check(14.2, _Matmul("int8", _LARGE, _ROW, scale_dtype=FP32)),
    _check(16.0, _Matmul("f8e4m3", _LARGE, _ROW, scale_dtype=FP32)),
    _check(30.2, _Matmul("ternary", _SMALL, _ROW)),
    _check(33.4, _Matmul("uint2", _SMALL, 128, zero_dtype=torch.uint8)),
    _check(28.8, _Matmul("int2", _SMALL, 128, FP16, FP16)),
    _check(37.8, _Matmul("int2", _SMALL, 128, arch=80)),
    _check(0, _Matmul("int2", _SMALL, 128, arch=100)),
    _check(24.5, _Matmul("uint3", _SMALL, 128, zero_dtype=torch.uint8)),
    _check(27.8, _Matmul("int3", _SMALL, 128, arch=80)),
    _check(31.1, _Matmul("int3", _LARGE, 128)),
    _check(23.1, _Matmul("f3e1m1", _SMALL, 128)),
    _check(16.0, _Matmul("int5", _SMALL, 128)),
    _check(23.7, _Matmul("f5e2m2", _SMALL, 128)),
    _check(14.1, _Matmul("int6", _SMALL, 128)),
    _check(20.3, _Matmul("f6e2m3", _SMALL, 128)),
    _check(19.3, _Matmul("f6e3m2", _SMALL, 128, FP16, FP16)),
    _check(24.6, _Matmul("f6e3m2", _SMALL, 32)),
    _check(23.2, _Matmul("f6e3m2", _SMALL, 128, arch=89)),
    _check(0, _Matmul("f6e3m2", _SMALL, 128, arch=100)),
    _check(11.8, _Matmul("int7", _SMALL, 128)),
    _check(14.6, _Matmul("int7", _SMALL, 128, arch=89)),
    _check(30.2, _Matmul("int7", _LARGE, 128, arch=89)),
    _check(17.3, _Matmul("f7e3m3", _SMALL, 128)),
    _check(13.1, _Matmul("uint8", _SMALL, 128, zero_dtype=torch.uint8)),
    _check(12.8, _Matmul("f8e5m2", _SMALL, _ROW, scale_dtype=FP32)),
    _check(6.8, _Matmul("f8e5m2", _SMALL, _ROW, FP16, FP32)),
    _check(26.5, _Matmul("f4e2m1", _SMALL, 32)),
    _check(26.6, _Matmul("int4", _SMALL, 32, scale_dtype=_E8M0)),
    _check(36.5, _Matmul("f4e2m1", _SMALL, 32, FP16, _E8M0)),
    _check(45.6, _Matmul("f4e2m1", _LARGE, 32, scale_dtype=_E8M0)),
    _check(20.2, _Matmul("f8e4m3", _SMALL, 32, scale_dtype=_E8M0)),
    _check(29.5, _Matmul("nf4", _SMALL, 64, scale_dtype=_E4M3, global_scale=True)),
    _check(26.8, _Matmul("f4e2m1", _SMALL, 32, scale_dtype=_E8M0, arch=80)),
    _check(40.9, _Matmul("f4e2m1", _SMALL, 16, scale_dtype=_E4M3, global_scale=True, arch=80)),
    _check(35.2, _Matmul("f4e2m1", _SMALL, 16, scale_dtype=_E4M3, global_scale=True, arch=89)),
    _check(0, _Matmul("f4e2m1", _SMALL, 32, scale_dtype=_E8M0, arch=100)),
    _check(0, _Matmul("f4e2m1", _SMALL, 16, scale_dtype=_E4M3, global_scale=True, arch=100)),
    _check(36.7, _Matmul("int4", _SMALL, 32, sparse=True)),
    _check(32.6, _Matmul("int4", _SMALL, 64, sparse=True)),
    _check(27.9, _Matmul("int4", _SMALL, 256, sparse=True)),
    _check(26.4, _Matmul("int4", _SMALL, _ROW, sparse=True)),
    _check(28.4, _Matmul("int4", _SMALL, 128, FP16, FP16, sparse=True)),
    _check(30.9, _Matmul("int4", _SMALL, 128, shape=_RAGGED, sparse=True)),
    _check(31.0, _Matmul("int4", _MIDDLE, 128, sparse=True)),
    _check(39.6, _Matmul("int4", _LARGE, 128, sparse=True)),
    _check(62.0, _Matmul("int4", _LARGE, 32, sparse=True)),
    _check(34.4, _Matmul("int4", _SMALL, 128, arch=89, sparse=True)),
    _check(0, _Matmul("int4", _SMALL, 128, arch=100, sparse=True)),
    _check(19.1, _Matmul("int4", _MIDDLE, 128, experts=64)),
    _check(25.7, _Matmul("int4", _LARGE, 128, experts=8)),
    _check(18.7, _Matmul("int4", _SMALL, 128, shape=_RAGGED, experts=8)),
    _check(16.2, _Matmul("int4", _SMALL, _ROW, experts=8)),
    _check(33.1, _Matmul("uint4", _LARGE, 128, zero_dtype=torch.uint8, experts=8)),
    _check(29.5, _Matmul("nf4", _SMALL, 64, experts=8)),
    _check(10.8, _Matmul("int8", _SMALL, _ROW, scale_dtype=FP32, experts=8)),
    _check(12.8, _Matmul("f8e4m3", _SMALL, _ROW, scale_dtype=FP32, experts=8)),
    _check(28.4, _Matmul("int4", _SMALL, 128, sparse=True, experts=8)),
    _check(17.5, _Matmul("int4", _SMALL, 128, arch=80, experts=8)),
    _check(17.5, _Matmul("int4", _SMALL, 128, arch=89, experts=8)),
    _check(0, _Matmul("int4", _SMALL, 128, arch=100, experts=8)),
    _check(30.8, _Matmul("f4e2m1", _SMALL, 32, scale_dtype=_E8M0, experts=8)),
    _check(38.0, _Matmul("f4e2m1", _SMALL, 16, scale_dtype=_E4M3, global_scale=True, experts=8)),
)
_NAMES = {check.name for check in (*CHECKS, *_CHOSEN)}
SLOW_CHECKS = (*_CHOSEN, *(check for check in _SETTINGS if check.name not in _NAMES))

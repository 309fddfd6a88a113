"""Checks of the matmuls with weights in planes."""

from __future__ import annotations

from collections.abc import Mapping
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

__all__ = ["CHECKS"]

#: a weight whose tiles are all full
_EVEN = (4096, 4096)
_SMALL, _MIDDLE, _LARGE, _MANY = TILE_CONFIGS
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
        "offs_ptr" if case.experts else "bias_ptr": "*i32" if case.experts else x,
        "out_ptr": x,
        "partial_ptr": "*fp32",
        "semaphore_ptr": "*i32",
    }
    sizes: tuple[str, ...] = (
        "M", "N", "K", "stride_x", "n_tiles", "k_tiles", "tiles_per_split", "splits"
    )  # fmt: skip
    sized, pdl = {"N": n, "K": k, "stride_x": k}, case.arch >= 90
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
        aligned=(*_aligned(pointers), *(name for name, size in sized.items() if size % 16 == 0)),
    )  # fmt: skip


def _aligned(pointers: Mapping[str, str]) -> tuple[str, ...]:
    """Those whose alignment launches look at; see `do_not_specialize_on_alignment` of the kernels."""
    return tuple(name for name in pointers if name not in ("bias_ptr", "offs_ptr", "semaphore_ptr"))


def _check(budget: float, case: _Matmul) -> Check:
    """For 128 bytes of weights."""
    build = partial(_build, case)
    if case.arch >= 100:
        # tensor memory: another loop, for which no budget is known
        return Check(case.name, build, REGISTERS, SHARED[case.arch])
    tiles, warps = case.tiles, case.config.num_warps
    words = case.config.block_n * tiles.plane_k
    # 64 × 16 weights a warp group and instruction; before, 16 × 16 weights a warp and 8 columns. Sums of
    # activations for zero points are as many again
    hgmma = tiles.planes * words // (64 * 16 * (warps // 4)) * (1 if case.zero_dtype is None else 2)
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
        counts={"HGMMA": hgmma} if case.arch == 90 else {} if case.zero_dtype else {"HMMA": hmma},
        present=("LDGSTS", "LOP3"),
        anywhere=pdl if case.arch == 90 else (),
    )


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

#: one for each kernel and family of formats: budgets are what was counted, and a tenth more
CHECKS = (
    _embedding_gate("uint4", 90),
    _check(19.8, _Matmul("int4", _SMALL, 128)),
    _check(21.0, _Matmul("int4", _MIDDLE, 128)),
    _check(27.6, _Matmul("int4", _LARGE, 128)),
    _check(34.8, _Matmul("int4", _MANY, 128)),
    _check(27.4, _Matmul("uint4", _SMALL, 64, zero_dtype=BF16)),
    _check(32.5, _Matmul("nf4", _SMALL, 64)),
    _check(31.2, _Matmul("f4e2m1", _SMALL, 32, scale_dtype=_E8M0)),
    _check(11.9, _Matmul("int8", _SMALL, _ROW, scale_dtype=FP32)),
    _check(31.2, _Matmul("int4", _SMALL, 128, sparse=True)),
    _check(20.0, _Matmul("int4", _SMALL, 128, experts=8)),
)

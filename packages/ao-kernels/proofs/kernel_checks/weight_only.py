"""Checks of the matmuls with weights in planes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ao_core.ext import registry
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
from ao_triton_checks.aot import Build
from ao_triton_checks.limits import Check
from kernel_checks.common import BF16, FP32, PDL, REGISTERS, SHARED, TYPES

__all__ = ["CHECKS"]

#: a weight whose tiles are all full
_EVEN = (4096, 4096)
_SMALL, _MIDDLE, _LARGE, _MANY = TILE_CONFIGS
#: what may begin anywhere: the kernels' `do_not_specialize_on_alignment`
_ANYWHERE = ("bias_ptr", "offs_ptr", "semaphore_ptr")
_ROW = _EVEN[1]


@dataclass(frozen=True)
class _Matmul:
    """A matmul as the kernel `linear` is compiled for it, with a bias, in splits of K."""

    numbers: str
    config: TileConfig
    group: int
    scale_dtype: torch.dtype = BF16
    zero_dtype: torch.dtype | None = None
    sparse: bool = False
    #: 0: one weight
    experts: int = 0

    @property
    def format(self) -> Format:
        return known(registry.dtypes.get(self.numbers), sparse=self.sparse)

    @property
    def tiles(self) -> Tiling:
        return tiling(*_EVEN, self.group, self.format)

    @property
    def name(self) -> str:
        more = ("" if self.zero_dtype is None else " zero", " 2:4" * self.sparse)
        of = f" of {self.experts} experts" if self.experts else ""
        return f"{self.numbers} g{self.group}{''.join(more)} rows {self.config.block_m}{of}"


def _build(case: _Matmul) -> Build:
    """The kernel `linear`, as `ops` launches it, and for experts that of `experts`."""
    from ao_kernels.triton.weight_only import kernel, kernel_experts
    from ao_kernels.triton.weight_only.op_experts import groups_of

    x, scale = TYPES[BF16], TYPES[case.scale_dtype]
    pointers = {
        "x_ptr": x,
        "w_ptr": "*i16",
        "scale_ptr": scale,
        "global_scale_ptr": scale,
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
    own = prefetch_options(case.config, pdl=True)
    if case.experts:
        sizes, own = (*sizes, "experts"), {"GROUPS": groups_of(case.experts), "PDL": True}
    return Build(
        kernel_experts.linear if case.experts else kernel.linear,
        {**pointers, **dict.fromkeys(sizes, "i32")},
        constants(
            case.format, case.tiles, case.config, 4, BF16, case.scale_dtype, case.zero_dtype,
            bias=not case.experts,
        ) | own,
        num_warps=case.config.num_warps,
        num_stages=stages_of(case.format, case.tiles, case.config, SHARED),
        aligned=(*(name for name in pointers if name not in _ANYWHERE), "N", "K", "stride_x"),
    )  # fmt: skip


def _check(budget: float, case: _Matmul) -> Check:
    """For 128 bytes of weights."""
    tiles, config = case.tiles, case.config
    words = config.block_n * tiles.plane_k
    # 64 × 16 weights a warp group and instruction; sums of activations for zero points are as many again
    hgmma = tiles.planes * words // (64 * 16 * (config.num_warps // 4))
    return Check(
        case.name,
        partial(_build, case),
        REGISTERS,
        SHARED,
        work=words * 2 * case.format.words / 128,
        budget=budget,
        counts={"HGMMA": hgmma * (1 if case.zero_dtype is None else 2)},
        present=("LDGSTS", "LOP3"),
        # known weights are brought nearer meanwhile
        anywhere=PDL if case.experts else (*PDL, "CCTL"),
    )


def _build_values(kernel: str, numbers: str) -> Build:
    """The kernel `embedding` or `dequantize` for groups of 64 and zero points, as `ops` launches it."""
    from ao_kernels.triton.weight_only import kernel_dequantize
    from ao_kernels.triton.weight_only.op import IDS

    (n, k), fmt = _EVEN, known(registry.dtypes.get(numbers))
    tiles = tiling(n, k, 64, fmt)
    lookup = kernel == "embedding"
    pointers = {
        **({"ids_ptr": "*i64"} if lookup else {}),
        "w_ptr": "*i16",
        "scale_ptr": "*bf16",
        "global_scale_ptr": "*bf16",
        "zero_ptr": "*bf16",
        "table_ptr": "*i32",
        "out_ptr": "*bf16",
    }
    sizes = (*(("count",) if lookup else ()), "N", "K", "k_tiles")
    chosen = {
        **({"IDS": IDS} if lookup else {}),
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
    fn = getattr(kernel_dequantize, kernel)
    return Build(fn, types, chosen, aligned=(*pointers, "N", "K"))


def _embedding_check() -> Check:
    """Neither spills nor takes shared memory for more than what is beside the codes."""
    build = partial(_build_values, "embedding", "uint4")
    return Check("embedding uint4 g64", build, registers=64, shared=4096)


def _dequantize_check(budget: float) -> Check:
    """For 128 bytes that are read or written; there is no loop, so all instructions count."""
    tile = BLOCK_N * tiling(*_EVEN, 64, known(registry.dtypes.get("uint4"))).width
    return Check(
        "dequantize uint4 g64",
        partial(_build_values, "dequantize", "uint4"),
        registers=140,
        shared=4096,
        work=tile * (1 / 2 + BF16.itemsize) / 128,
        budget=budget,
        holding=(),
    )


_E8M0 = torch.float8_e8m0fnu
#: one for each kernel and family of formats: budgets are what was counted, and a tenth more
CHECKS = (
    _embedding_check(),
    _dequantize_check(19.6),
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

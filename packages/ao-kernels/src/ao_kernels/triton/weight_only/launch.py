"""How the weight-only kernels are specialized for a call: what is launched, and what AOT checks compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_kernels.triton.shared.device import capability, shared_memory
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.ptx import PREFETCH, load_scale, load_zero, ones
from ao_kernels.triton.shared.tile_config import LaunchConfig, TileConfig, options, splits_of
from ao_kernels.triton.shared.tiling import Tiling
from ao_kernels.triton.weight_only.formats import TABLES, Format
from ao_kernels.triton.weight_only.lut_ptx import load_table
from ao_kernels.triton.weight_only.scales import KINDS, load_bytes

__all__ = [
    "TILE_CONFIGS",
    "arguments",
    "constants",
    "launch_config_of",
    "prefetch_options",
    "stages_of",
    "tile_config_of",
]


#: from small M to large; beyond the last there are several M tiles. Activations come from L2 for each block
#: of N, at 32 rows and 128 of N as many bytes as weights: so a CTA has 256. With 64 rows there are no
#: registers
TILE_CONFIGS = (
    TileConfig(16, 4, 4),
    TileConfig(32, 8, 4, 256),
    TileConfig(64, 8, 3),
    TileConfig(128, 8, 3),
)
#: with zero points sums of activations need as many registers as sums of products
_WITH_ZERO = (TILE_CONFIGS[0], TileConfig(32, 4, 4), TILE_CONFIGS[2])


def tile_config_of(m: int, *, zero_point: bool = False) -> TileConfig:
    """The smallest that takes m rows in one tile, or the largest."""
    fitting = _WITH_ZERO if zero_point else TILE_CONFIGS
    return next((config for config in fitting if m <= config.block_m), fitting[-1])


def stages_of(fmt: Format, tiles: Tiling, config: TileConfig, shared: int) -> int:
    """The pipeline stages, or as many fewer as do not fit: all but one are in `shared` bytes."""
    stage = 2 * (config.block_n * tiles.plane_k * fmt.words + tiles.width * config.block_m)
    return max(2, min(config.num_stages, shared // stage + 1))


@lru_cache(maxsize=4096)
def launch_config_of(
    tiles: Tiling, m: int, sm_count: int, *, zero_point: bool = False
) -> LaunchConfig:
    """What serves m rows."""
    config = tile_config_of(m, zero_point=zero_point)
    output_tiles = -(-tiles.n // config.block_n) * -(-m // config.block_m)
    return LaunchConfig(config, splits_of(output_tiles, tiles.k_tiles, config.num_warps, sm_count))


def loads_of(scale_dtype: torch.dtype, tiles: Tiling, *, sm80: bool) -> str:
    """The assembly that loads a scale, or as many as possible of those that lie beside each other."""
    if scale_dtype not in KINDS:
        return load_scale(8 * scale_dtype.itemsize)
    count = next(count for count in (4, 2, 1) if tiles.groups_per_tile % count == 0)
    return load_bytes(KINDS[scale_dtype], count, sm80=sm80)


def constants(
    fmt: Format,
    tiles: Tiling,
    config: TileConfig,
    splits: int,
    x_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    zero_dtype: torch.dtype | None,
    bias: bool,
    *,
    assembly: bool = True,
    global_scale: bool = False,
    sm80: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of the function `matmul`; without `assembly` plain operations serve.

    `global_scale`, scales have one themselves; `sm80`, the device has no conversions of float8.
    """
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WORDS": fmt.words,
        "PLANES": tiles.planes,
        "PLANE_K": tiles.plane_k,
        "PLANES_PER_GROUP": tiles.planes_per_group,
        "OFFSET": fmt.offset,
        "ORDER": fmt.order,
        "SPARSE": fmt.sparse,
        "SPLIT": splits > 1,
        "SCALE": KINDS.get(scale_dtype),
        "HAS_GLOBAL_SCALE": global_scale,
        "HAS_ZERO": zero_dtype is not None,
        "HAS_BIAS": bias,
        "EVEN_K": tiles.k % tiles.width == 0,
        "ASM": fmt.assembly(ELEMENTS[x_dtype]) if assembly else None,
        "ONES": ones(ELEMENTS[x_dtype]) if assembly else None,
        "LOAD_SCALE": loads_of(scale_dtype, tiles, sm80=sm80) if assembly else None,
        "LOAD_ZERO": load_zero(zero_dtype) if assembly and zero_dtype else None,
        "LOAD_TABLE": load_table() if assembly and (fmt.is_lut or fmt.sparse) else None,
        "TABLE": fmt.lut_start + 16 * TABLES.index(x_dtype),
    }


def prefetch_options(config: TileConfig, *, pdl: bool) -> dict[str, Any]:
    """Further arguments of the kernel `linear`: the L2 prefetch, with programmatic dependent launch."""
    return {"PREFETCH": PREFETCH, "PREFETCH_TILES": config.num_stages if pdl else 0}


def arguments(
    x: Tensor,
    fmt: Format,
    tiles: Tiling,
    config: TileConfig,
    splits: int,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    *,
    bias: bool,
    pdl: bool,
) -> dict[str, Any]:
    """What one weight's matmul and that of experts are launched with alike: `constants` and `options`."""
    return constants(
        fmt, tiles, config, splits, x.dtype, scale.dtype,
        None if zero_point is None else zero_point.dtype, bias,
        assembly=x.is_cuda, global_scale=global_scale is not None, sm80=capability(x.device) < (8, 9),
    ) | options(
        config.num_warps, stages_of(fmt, tiles, config, shared_memory(x.device)), pdl=pdl
    )  # fmt: skip

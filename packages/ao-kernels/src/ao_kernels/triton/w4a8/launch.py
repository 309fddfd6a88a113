"""How matmuls of activations in 8 bits with weights in `plane32` are specialized and launched."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_kernels.triton.shared.activation_sums import activation_sums
from ao_kernels.triton.shared.device import capability, on_device, sm_count, supports_pdl
from ao_kernels.triton.shared.ptx import PREFETCH, load_scale
from ao_kernels.triton.shared.tile_config import (
    FEWEST_TILES,
    LaunchConfig,
    TileConfig,
    launch_configs_around,
    options,
    splits_of,
    zero_kind,
)
from ao_kernels.triton.shared.tiling import BLOCK_N, Tiling
from ao_kernels.triton.shared.workspace import split_k_workspace
from ao_kernels.triton.tuning.choose import Case, choose
from ao_kernels.triton.tuning.store import Problem, bucket
from ao_kernels.triton.w4a8.layout import PLANE_K, PLANES, Stored, stored, tiling
from ao_kernels.triton.w4a8.ptx import to_float

__all__ = [
    "TILE_CONFIGS",
    "case_of",
    "constants",
    "launch",
    "launch_configs_of",
    "plane32_linear",
    "rule",
    "tile_config_of",
]

#: from small M to large; beyond the last there are several M tiles
TILE_CONFIGS = (
    TileConfig(16, 4, 4),
    TileConfig(32, 4, 4),
    TileConfig(64, 8, 3),
    TileConfig(128, 8, 3),
)
#: codes of activations are in rows that begin at multiples of so many bytes, as copies to shared memory want
_ALIGNED = 16


def tile_config_of(m: int, *, zero_point: bool = False) -> TileConfig:
    """The smallest that takes m rows in one tile, or the largest.

    Zero points of weights are a matmul of their own after the loop: the last has too few registers for it.
    """
    fitting = TILE_CONFIGS[:-1] if zero_point else TILE_CONFIGS
    return next((config for config in fitting if m <= config.block_m), fitting[-1])


def rule(tiles: Tiling, m: int, sm_count: int, *, zero_point: bool) -> LaunchConfig:
    """What serves m rows where nothing was measured."""
    config = tile_config_of(m, zero_point=zero_point)
    return LaunchConfig(*config, splits_of(tiles, -(-m // config.block_m), sm_count))


def launch_configs_of(
    tiles: Tiling, m: int, sm_count: int, *, zero_point: bool
) -> tuple[LaunchConfig, ...]:
    """What may serve any number of rows whose bucket is that of m."""
    first = rule(tiles, bucket(m), sm_count, zero_point=zero_point)
    return launch_configs_around(first, tiles.k_tiles // FEWEST_TILES)


@lru_cache(maxsize=4096)
def case_of(
    formats: tuple[str, str, str],
    dtypes: tuple[torch.dtype | None, torch.dtype],
    sizes: tuple[int, int, int],
    group: int,
    device: torch.device,
) -> Case[LaunchConfig]:
    """What settings are chosen for.

    `formats` are the dtype of activations and of weights, and the kind of zero points of these; `dtypes`
    those of scales and of the result; `sizes` m, n and k.
    """
    (m, n, k), zero_point = sizes, formats[-1] != "none"
    tiles, there = tiling(n, k, group), sm_count(device)
    problem = Problem("plane32_linear", (*formats, *dtypes, group), n, k, bucket(m))
    first = rule(tiles, m, there, zero_point=zero_point)
    return Case(
        problem, device, first, lambda: launch_configs_of(tiles, m, there, zero_point=zero_point)
    )


def constants(
    how: Stored,
    tiles: Tiling,
    config: TileConfig,
    splits: int,
    scale_dtype: torch.dtype,
    arch: tuple[int, int],
    *,
    zero_point: bool = False,
    x_zero: bool = False,
    bias: bool = False,
    assembly: bool = True,
    pdl: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of the kernel `linear`; without `assembly` plain operations serve."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": BLOCK_N,
        "PLANES": PLANES,
        "PLANE_K": PLANE_K,
        "PLANES_PER_GROUP": tiles.planes_per_group,
        "OFFSET": how.offset,
        "FACTOR": how.factor,
        "SPLITS": splits,
        "HAS_ZERO": zero_point,
        "HAS_X_ZERO": x_zero,
        "HAS_BIAS": bias,
        "EVEN_K": tiles.k % tiles.width == 0,
        "ASM": how.assembly() if assembly else None,
        # sums of groups are of up to 256 products, each of up to 2**14
        "TO_FLOAT": to_float() if assembly and arch == (8, 0) else None,
        "LOAD_SCALE": load_scale(8 * scale_dtype.itemsize) if assembly else None,
        "PREFETCH": PREFETCH,
        "PREFETCH_TILES": config.num_stages if pdl else 0,
    }


@torch.library.custom_op("ao_kernels::plane32_linear", mutates_args=())
def plane32_linear(
    codes: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    sums: Tensor | None,
    bias: Tensor | None,
    n: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
) -> Tensor:
    """Quantized activations (M, K) times the transpose of a weight (n, K) in `plane32`, plus bias.

    Args:
        codes: int8; uint8 with zero points; or e4m3.
        x_scale: float32, of one or M elements.
        x_zero: uint8, of one or M elements.
        qdata: a part of the weight, see `Plane32`.
        scale: another.
        zero_point: another, of uint4.
        sums: another, where there is `x_zero`.
        bias: (n,).
        n: rows of the weight.
        group: columns that share a scale.
        numbers: of the weight, "int4" or "uint4".
        dtype: of the result: bfloat16, float16 or float32.
    """
    return launch(
        codes, x_scale, x_zero, qdata, scale, zero_point, sums, bias, n, group, numbers, dtype
    )  # fmt: skip


@plane32_linear.register_fake
def _(
    codes: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    sums: Tensor | None,
    bias: Tensor | None,
    n: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((codes.shape[0], n), dtype=dtype)


def launch(
    codes: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    sums: Tensor | None,
    bias: Tensor | None,
    n: int,
    group: int,
    numbers: str,
    dtype: torch.dtype,
    *,
    setting: LaunchConfig | None = None,
) -> Tensor:
    """The op itself; `setting` says how, where that is not to be chosen."""
    from ao_kernels.triton.w4a8 import kernel

    (m, k), out = codes.shape, codes.new_empty((codes.shape[0], n), dtype=dtype)
    if m == 0:
        return out
    how = stored(numbers, integers=not codes.is_floating_point())
    tiles = tiling(n, k, group)
    if setting is None:
        act = "f8e4m3" if codes.is_floating_point() else "int8" if x_zero is None else "uint8"
        formats, dtypes = (act, numbers, zero_kind(zero_point)), (scale.dtype, dtype)
        setting = choose(
            case_of(formats, dtypes, (m, n, k), group, codes.device),
            lambda each: launch(
                codes, x_scale, x_zero, qdata, scale, zero_point, sums, bias, n, group, numbers, dtype,
                setting=each,
            ),
        )  # fmt: skip
    config, splits = setting.config, setting.splits
    m_tiles = -(-m // config.block_m)
    output_tiles, pdl = tiles.n_tiles * m_tiles, supports_pdl(codes.device)
    with on_device(codes):
        x_MK = _padded((codes ^ 128).view(torch.int8) if x_zero is not None else codes)
        x_scale = _by_row(x_scale, m)
        x_sums = out if zero_point is None else activation_sums(x_MK, tiles, group, m)
        partial, semaphores = split_k_workspace(out, output_tiles, splits, BLOCK_N * config.block_m)
        kernel.linear[(tiles.n_tiles, splits, m_tiles)](
            x_MK, x_scale, x_scale if x_zero is None else _by_row(x_zero, m), x_sums,
            qdata, scale, scale if zero_point is None else zero_point, scale if sums is None else sums,
            out if bias is None else bias, out, partial, semaphores,
            m, n, x_MK.shape[1], x_MK.stride(0), tiles.k_tiles, -(-tiles.k_tiles // splits),
            **constants(
                how, tiles, config, splits, scale.dtype, capability(codes.device),
                zero_point=zero_point is not None, x_zero=x_zero is not None, bias=bias is not None,
                assembly=codes.is_cuda, pdl=pdl,
            ),
            **options(config, config.num_stages, pdl=pdl),
        )  # fmt: skip
    return out


def _by_row(each: Tensor, m: int) -> Tensor:
    """One number for each of m rows, from that or from one for all."""
    return each.reshape(-1).expand(m).contiguous()


def _padded(codes: Tensor) -> Tensor:
    """The same codes in rows that begin at multiples of 16 bytes, with zeros at their ends."""
    rows, columns = codes.shape
    if (
        codes.stride(1) == 1
        and codes.stride(0) % _ALIGNED == columns % _ALIGNED == codes.data_ptr() % _ALIGNED == 0
    ):
        return codes
    padded = codes.new_zeros((rows, -(-columns // _ALIGNED) * _ALIGNED), dtype=torch.uint8)
    padded[:, :columns] = codes.view(torch.uint8)
    return padded.view(codes.dtype)

"""How matmuls of activations in 8 bits with weights in `plane32` are specialized and launched."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_kernels.triton.shared.device import capability, on_device, sm_count, supports_pdl
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.ptx import PREFETCH, load_scale, load_zero, ones
from ao_kernels.triton.shared.tile_config import LaunchConfig, TileConfig, options, splits_of
from ao_kernels.triton.shared.tiling import BLOCK_N, Tiling
from ao_kernels.triton.shared.workspace import split_k_workspace
from ao_kernels.triton.w4a8.layout import PLANE_K, PLANES, Stored, stored, tiling
from ao_kernels.triton.w4a8.ptx import to_float

__all__ = [
    "TILE_CONFIGS",
    "constants",
    "launch",
    "launch_config_of",
    "plane32_linear",
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

    With zero points of weights sums of activations need as many registers as sums of products: there is no
    largest.
    """
    fitting = TILE_CONFIGS[:-1] if zero_point else TILE_CONFIGS
    return next((config for config in fitting if m <= config.block_m), fitting[-1])


@lru_cache(maxsize=4096)
def launch_config_of(
    tiles: Tiling, m: int, sm_count: int, *, zero_point: bool = False
) -> LaunchConfig:
    """What serves m rows."""
    config = tile_config_of(m, zero_point=zero_point)
    output_tiles = tiles.n_tiles * -(-m // config.block_m)
    return LaunchConfig(config, splits_of(output_tiles, tiles.k_tiles, config.num_warps, sm_count))


def constants(
    how: Stored,
    tiles: Tiling,
    config: TileConfig,
    splits: int,
    scale_dtype: torch.dtype,
    arch: tuple[int, int],
    *,
    zero_dtype: torch.dtype | None = None,
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
        "SPLIT": splits > 1,
        "HAS_ZERO": zero_dtype is not None,
        "HAS_X_ZERO": x_zero,
        "HAS_BIAS": bias,
        "EVEN_K": tiles.k % tiles.width == 0,
        "ASM": how.assembly() if assembly else None,
        # sums of groups are of up to 256 products, each of up to 2**14
        "TO_FLOAT": to_float() if assembly and arch == (8, 0) else None,
        "ONES": ones("int8" if how.factor < 1 else "e4m3") if assembly else None,
        "LOAD_ZERO": load_zero(zero_dtype) if assembly and zero_dtype else None,
        "LOAD_SCALE": load_scale(8 * scale_dtype.itemsize) if assembly else None,
        "PREFETCH": PREFETCH,
        "PREFETCH_TILES": config.num_stages if pdl else 0,
    }


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
        setting: for tests, how to launch.
    """
    from ao_kernels.triton.w4a8 import kernel

    (m, k), out = codes.shape, codes.new_empty((codes.shape[0], n), dtype=dtype)
    if m == 0:
        return out
    how = stored(numbers, integers=not codes.is_floating_point())
    tiles = tiling(n, k, group)
    config, splits = setting or launch_config_of(
        tiles, m, sm_count(codes.device), zero_point=zero_point is not None
    )
    m_tiles, pdl = -(-m // config.block_m), supports_pdl(codes.device)
    with on_device(codes):
        x_MK = _padded((codes ^ 128).view(torch.int8) if x_zero is not None else codes)
        x_scale = _by_row(x_scale, m)
        partial, semaphores = split_k_workspace(
            out, tiles.n_tiles * m_tiles, splits, BLOCK_N * config.block_m
        )
        kernel.linear[(m_tiles, tiles.n_tiles, splits)](
            x_MK, x_scale, x_scale if x_zero is None else _by_row(x_zero, m),
            qdata, scale, scale if zero_point is None else zero_point, scale if sums is None else sums,
            out if bias is None else bias.contiguous(), out, partial, semaphores,
            m, n, x_MK.shape[1], x_MK.stride(0), tiles.k_tiles, -(-tiles.k_tiles // splits), splits,
            **constants(
                how, tiles, config, splits, scale.dtype, capability(codes.device),
                zero_dtype=None if zero_point is None else zero_point.dtype, x_zero=x_zero is not None,
                bias=bias is not None, assembly=codes.is_cuda, pdl=pdl,
            ),
            **options(config.num_warps, config.num_stages, pdl=pdl),
        )  # fmt: skip
    return out


plane32_linear = define(
    "plane32_linear(Tensor codes, Tensor x_scale, Tensor? x_zero, Tensor qdata, Tensor scale, "
    "Tensor? zero_point, Tensor? sums, Tensor? bias, SymInt n, SymInt group, str numbers, ScalarType dtype) "
    "-> Tensor",
    launch,
    lambda codes, x_scale, x_zero, qdata, scale, zero_point, sums, bias, n, group, numbers, dtype: (
        codes.new_empty((codes.shape[0], n), dtype=dtype)
    ),
)


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

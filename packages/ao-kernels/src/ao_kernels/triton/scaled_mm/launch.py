"""Matmuls of operands that are both in 8 bits: float8 or int8, with the scales applied inside."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_kernels.triton.shared.device import capability, on_device, sm_count, supports_pdl
from ao_kernels.triton.shared.ops import define
from ao_kernels.triton.shared.tile_config import options

__all__ = [
    "BLOCK_K",
    "TILE_CONFIGS",
    "TileConfig",
    "aligned",
    "constants",
    "launch",
    "promotes",
    "scaled_matmul",
    "tile_config_for",
    "tile_config_of",
]

#: K of a tile of both operands, and K of a block that shares a scale
BLOCK_K = 128
#: rasterization: tiles along M of a group of CTAs
GROUP_M = 8


class TileConfig(NamedTuple):
    """The tile of a CTA, its warps, and stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


#: the largest has no room for sums beside those of the tensor cores
TILE_CONFIGS = (
    TileConfig(128, 256, 8, 3),
    TileConfig(128, 128, 8, 3),
    TileConfig(64, 128, 4, 4),
    TileConfig(64, 32, 4, 8),
)


def tile_configs_of(m: int, *, largest: bool) -> tuple[TileConfig, ...]:
    """Those that may serve m rows an expert.

    `largest` says whether the first is among them.
    """
    return tuple(
        each for each in TILE_CONFIGS[0 if largest else 1 :] if each.block_m <= 64 or m > 64
    )


def tile_config_of(m: int, n: int, experts: int, sm_count: int, *, largest: bool) -> TileConfig:
    """The one with which an SM reads the fewest rows of both operands, of m × n per expert.

    Tensor cores multiply in 8 bits faster than tiles arrive from the cache, whatever their size, so rows that
    are read count, and not how many tiles are full.
    """

    def rows_read(config: TileConfig) -> int:
        tiles = -(-m // config.block_m) * -(-n // config.block_n) * experts
        return -(-tiles // sm_count) * (min(m, config.block_m) + config.block_n)

    return min(tile_configs_of(m, largest=largest), key=rows_read)


def promotes(dtype: torch.dtype, a_scales: str, fast_accum: bool) -> bool:
    """Whether sums of `BLOCK_K` columns are added up outside of the tensor cores."""
    return dtype != torch.int8 and (a_scales == "block" or not fast_accum)


def tile_config_for(
    m: int, n: int, experts: int, device: torch.device, *, promote: bool
) -> TileConfig:
    """What serves m rows for all experts."""
    # from sm_100 on sums have a memory of their own, and those of the largest do not fit into registers
    largest = not promote and capability(device) == (9, 0)
    return tile_config_of(-(-m // experts), n, experts, sm_count(device), largest=largest)


def constants(
    config: TileConfig,
    kinds: tuple[str, str],
    *,
    integers: bool,
    promote: bool = False,
    zero_point: bool = False,
    bias: bool = False,
    groups: int = 0,
    tma: bool = True,
    pdl: bool = False,
) -> dict[str, Any]:
    """The compile-time arguments of the kernel `matmul`; `kinds` are A_SCALES and B_SCALES."""
    import triton.language as tl

    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": BLOCK_K,
        "GROUP_M": GROUP_M,
        "SUM": tl.int32 if integers else tl.float32,
        "A_SCALES": kinds[0],
        "B_SCALES": kinds[1],
        "PROMOTE": promote,
        "HAS_ZERO": zero_point,
        "HAS_BIAS": bias,
        "GROUPS": groups,
        "TMA": tma,
        "PDL": pdl,
    }


def launch(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_scales: str,
    b_scales: str,
    dtype: torch.dtype,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    fast_accum: bool = True,
    sums: Tensor | None = None,
    *,
    config: TileConfig | None = None,
    tma: bool | None = None,
) -> Tensor:
    """Codes a (M, K) times the transpose of codes b (N, K), or of those of experts (E, N, K), scaled.

    Args:
        a: float8, or int8.
        b: the same kind; e4m3 and e5m2 may meet.
        a_scale: float32, of one, M, or M × ceil(K / 128) elements, as `a_scales` says.
        b_scale: float32, for each expert one, N, N × ceil(K / 128) or ceil(N / 128) × ceil(K / 128), as
            `b_scales` says. Of experts there is no "one", nor a "block".
        a_scales: "one", "row" or "block".
        b_scales: "one", "row", and beside "block" that or "square".
        dtype: of the result: bfloat16, float16 or float32.
        zero_point: int32 (1, 1) or (M, 1), the code of a that stands for 0; of int8 alone.
        bias: (N,).
        offs: int32 (E,), the row of a after each expert's last. Rows from offs[-1] on become 0; where offsets
            decrease or exceed M, what comes out is undefined, as nobody waits to look at them.
        sums: int32 (N,), or (E · N,), of the rows of b, which `zero_point` needs; None: they are added up,
            which reads b once more.
        config: for tests, and so is `tma`: what follows from sizes and the device.
        tma: see there.
        fast_accum: leave sums of float8 to the tensor cores, which on sm_90 have 14 bits for them.

    Returns:
        (M, N).
    """
    from ao_kernels.triton.scaled_mm import kernel

    (m, k), n = a.shape, b.shape[-2]
    experts = 1 if offs is None else offs.shape[0]
    out = a.new_empty((m, n), dtype=dtype)
    if out.numel() == 0:
        return out
    integers, promote = a.dtype == torch.int8, promotes(a.dtype, a_scales, fast_accum)
    if tma is None:
        tma = capability(a.device) >= (9, 0)
    if config is None:
        config = tile_config_for(m, n, experts, a.device, promote=promote)
    m_tiles = -(-m // config.block_m) + (0 if offs is None else experts)
    pdl = supports_pdl(a.device)
    with on_device(a):
        a, b = aligned(a), aligned(b.reshape(-1, k))
        if b_scales == "block":  # as the kernel reads them, without looking where the rows end
            b_scale = F.pad(b_scale.t(), (0, -n % BLOCK_K))
        zero_M = a_scale if zero_point is None else zero_point.expand(m, 1).contiguous()
        if sums is None:
            sums = a_scale if zero_point is None else b.sum(1, dtype=torch.int32)
        kernel.matmul[(m_tiles * -(-n // config.block_n),)](
            _operand(a, config.block_m, tma), _operand(b, config.block_n, tma),
            a_scale.contiguous(), b_scale.contiguous(), zero_M, sums,
            out if bias is None else bias.contiguous(),
            a_scale if offs is None else offs.contiguous(), out,
            m, n, k, a.stride(0), b.stride(0), m_tiles, experts,
            **constants(
                config, (a_scales, b_scales), integers=integers, promote=promote,
                zero_point=zero_point is not None, bias=bias is not None,
                groups=0 if offs is None else 1 << experts.bit_length(), tma=tma, pdl=pdl,
            ),
            **options(config.num_warps, config.num_stages, pdl=pdl),
        )  # fmt: skip
    return out


scaled_matmul = define(
    "scaled_matmul(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str a_scales, str b_scales, "
    "ScalarType dtype, Tensor? zero_point=None, Tensor? bias=None, Tensor? offs=None, bool fast_accum=True, "
    "Tensor? sums=None) -> Tensor",
    launch,
    lambda a, b, a_scale, b_scale, a_scales, b_scales, dtype, *_: a.new_empty(
        (a.shape[0], b.shape[-2]), dtype=dtype
    ),
)


def aligned(codes: Tensor) -> Tensor:
    """The same codes, in rows that begin at multiples of 16 bytes, as copies to shared memory want."""
    if codes.stride(1) == 1 and codes.stride(0) % 16 == 0 and codes.data_ptr() % 16 == 0:
        return codes
    rows, columns = codes.shape
    padded = codes.new_empty((rows, -(-columns // 16) * 16), dtype=torch.uint8)
    padded[:, :columns] = codes.view(torch.uint8)
    return padded.view(codes.dtype)[:, :columns]


def _operand(codes: Tensor, rows: int, tma: bool) -> Any:
    """Codes as the kernel takes them."""
    if not tma:
        return codes
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(codes, [rows, BLOCK_K])

"""What the Triton kernels may cost, compiled as they are launched: `nox -s gpu_proofs` checks.

The budget follows from the device: at 4.3 TB/s the 132 × 4 schedulers of an H200 issue 27.6 instructions
for each 128 bytes that arrive. A kernel above that waits for its own instructions, not for memory.
"""

from __future__ import annotations

from functools import partial

import torch

from ao_core.registry import registry
from ao_kernels.testing.aot import Build
from ao_kernels.testing.gates import Gate
from ao_kernels.triton.formats import known
from ao_kernels.triton.gates_sparse import MORE_SPARSE, SPARSE
from ao_kernels.triton.launch import ELEMENTS, POINTERS, REGIMES, Regime, constants
from ao_kernels.triton.plane16 import COLS, tiling

__all__ = ["GATES", "MORE", "build_adam", "build_cast", "build_linear"]

#: a weight whose tiles are all full, and one whose last tiles are not
EVEN, RAGGED = (4096, 4096), (4000, 4112)
#: spilling is worse than anything: a block may take what there is
_REGISTERS, _SHARED = 255, 227 * 1024


def build_linear(
    numbers: str,
    regime: Regime,
    group: int,
    x_dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.bfloat16,
    zero_dtype: torch.dtype | None = None,
    *,
    shape: tuple[int, int] = EVEN,
    arch: int = 90,
    splits: int = 4,
    sparse: bool = False,
) -> Build:
    """The kernel `linear`, with a bias, for a weight of a number format, as `ops` launches it."""
    from ao_kernels.triton.kernels import plane16

    fmt = known(registry.dtypes.get(numbers), sparse=sparse)
    tiles = tiling(*shape, group, fmt)
    x, scale = POINTERS[x_dtype], POINTERS[scale_dtype]
    pointers = {
        "x_ptr": x,
        "w_ptr": "*i16",
        "scale_ptr": scale,
        "zero_ptr": scale if zero_dtype is None else POINTERS[zero_dtype],
        "table_ptr": "*i32",
        "sums_ptr": x if zero_dtype is None else "*fp32",
        "bias_ptr": x,
        "out_ptr": x,
        "partial_ptr": "*fp32" if splits > 1 else x,
        "lock_ptr": "*i32" if splits > 1 else x,
    }
    sizes = ("M", "N", "K", "stride_x", "stride_sums", "tiles", "tiles_a_split")
    sized = {"N": shape[0], "K": shape[1], "stride_x": shape[1]}
    return Build(
        plane16.linear,
        {**pointers, **dict.fromkeys(sizes, "i32")},
        constants(fmt, tiles, regime, splits, x_dtype, scale_dtype, zero_dtype, bias=True),
        arch,
        regime.num_warps,
        regime.num_stages,
        aligned=(*pointers, *(name for name, size in sized.items() if size % 16 == 0)),
    )


def _gate(
    budget: float,
    numbers: str,
    regime: Regime,
    group: int,
    x_dtype: torch.dtype = torch.bfloat16,
    scale_dtype: torch.dtype = torch.bfloat16,
    zero_dtype: torch.dtype | None = None,
    *,
    shape: tuple[int, int] = EVEN,
    arch: int = 90,
    sparse: bool = False,
) -> Gate:
    tiles = tiling(*shape, group, known(registry.dtypes.get(numbers), sparse=sparse))
    words = COLS * tiles.plane
    # 64 × 16 weights a warp group and instruction; before, 16 × 16 weights a warp and 8 columns
    warps = regime.num_warps
    hgmma = tiles.planes * words // (64 * 16 * (warps // 4))
    hmma = tiles.planes * words * regime.rows // (16 * 16 * 8 * warps)
    zero = "" if zero_dtype is None else f" zero {ELEMENTS.get(zero_dtype, 'u8')}"
    ragged = "" if shape == EVEN else " ragged"
    kept = " 2:4" if sparse else ""
    name = (
        f"sm_{arch} {numbers}{kept} g{group} {ELEMENTS[x_dtype]} scale {POINTERS[scale_dtype][1:]}{zero} "
        f"rows {regime.rows}{ragged}"
    )
    build = partial(
        build_linear,
        numbers,
        regime,
        group,
        x_dtype,
        scale_dtype,
        zero_dtype,
        shape=shape,
        arch=arch,
        sparse=sparse,
    )
    if arch >= 100:
        # tensor memory: another loop, for which no budget is known
        return Gate(name, build, _REGISTERS, _SHARED)
    return Gate(
        name,
        build,
        _REGISTERS,
        _SHARED if arch == 90 else 99 * 1024 if arch == 89 else 163 * 1024,
        work=words * (6 if sparse else 2) / 128,
        budget=budget,
        counts={"HGMMA": hgmma} if arch == 90 else {"HMMA": hmma},
        present=("LDGSTS", "LOP3", "HFMA2|HADD2|HMUL2|PRMT"),
    )


def build_adam(
    dtype: torch.dtype = torch.bfloat16, *, stochastic: bool = False, arch: int = 90
) -> Build:
    """The kernel `step` for parameters and gradients of a dtype, as `adam.adam_step` launches it."""
    from ao_kernels.triton.adam import settings
    from ao_kernels.triton.kernels import adam

    numbers = ("beta1", "beta2", "eps", "rate", "root", "keep", "decay", "sign")
    types = {"tensor_ptr": "*i64", "chunk_ptr": "*i32", **dict.fromkeys(numbers, "fp32")}
    chosen = settings(dtype, dtype, aligned=True, stochastic=stochastic, assembly=True)
    return Build(
        adam.step, {**types, "seed": "i32"}, chosen, arch, 4, 1, ("tensor_ptr", "chunk_ptr")
    )


def _adam_gate(
    budget: float,
    dtype: torch.dtype = torch.bfloat16,
    *,
    stochastic: bool = False,
    arch: int = 90,
    conversions: int = 2,
) -> Gate:
    """For 32 parameters: at 10 bytes for one, an H200 has 69 instructions for them.

    A turn is over 1024. What is converted are the scales: one for 256 parameters.
    """
    return Gate(
        f"sm_{arch} adam f8e4m3 {POINTERS[dtype][1:]}{' stochastic' if stochastic else ''}",
        partial(build_adam, dtype, stochastic=stochastic, arch=arch),
        registers=128,
        shared=1024,
        conversions=conversions,
        work=1024 / 32,
        budget=budget,
        holding=("LDG",),
        counts={"LDG": 6, "STG": 5} if dtype.itemsize == 2 else {"LDG": 12, "STG": 8},
        present=("MUFU", "F2FP"),
        absent=("I2F", "LDL", "STL"),
    )


def build_cast(
    scales: str,
    dtype: torch.dtype = torch.bfloat16,
    numbers: str = "f8e4m3",
    *,
    transposed: bool = True,
    arch: int = 90,
) -> Build:
    """The kernel `cast`, as `cast.launch` does."""
    from ao_kernels.triton.cast import WARPS, settings
    from ao_kernels.triton.kernels import cast

    chosen = settings(numbers, scales, transposed=transposed, assembly=True)
    codes = f"*{chosen['FORMAT']}"
    pointers = {
        "x_ptr": POINTERS[dtype],
        "found_ptr": "*fp32",
        "found_t_ptr": "*fp32",
        "codes_ptr": codes,
        "scale_ptr": "*fp32",
        "codes_t_ptr": "*i32" if transposed else codes,
        "scale_t_ptr": "*fp32",
    }
    sizes = ("M", "N", "words", "blocks", "blocks_t")
    types = {**pointers, **dict.fromkeys(sizes, "i32")}
    return Build(cast.cast, types, chosen, arch, WARPS, 1, (*pointers, "M", "N", "words"))


def _cast_gate(
    budget: float,
    scales: str,
    dtype: torch.dtype = torch.bfloat16,
    numbers: str = "f8e4m3",
    *,
    transposed: bool = True,
    arch: int = 90,
) -> Gate:
    """For 128 bytes that are read or written. A turn is over a tile of 128 × 128.

    Layouts are converted for the transposed codes, and for magnitudes that warps find together.
    """
    moved = dtype.itemsize + (2 if transposed else 1)
    conversions = {"block": 6 if transposed else 4}.get(scales, 1 if transposed else 0)
    loads = 128 * 128 * dtype.itemsize // (16 * 32 * 8)
    # sm_89 converts into the lower half of a word only, and calls what follows the loop
    calls = ("CALL",) if arch >= 90 else ()
    packed = 32 if not transposed else 64 if arch >= 90 else 96
    return Gate(
        f"sm_{arch} cast {numbers} {scales} {POINTERS[dtype][1:]}{' and transposed' if transposed else ''}",
        partial(build_cast, scales, dtype, numbers, transposed=transposed, arch=arch),
        registers=168 if dtype.itemsize == 2 else 200,
        shared=16 * 1024 if transposed else 1024,
        conversions=conversions,
        work=128 * 128 * moved / 128,
        budget=budget,
        holding=("F2FP",),
        counts={"F2FP": packed, "LDG": loads + (8 if scales == "row" else 0)},
        absent=("I2F", "LDL", "STL", *calls, *(() if scales == "block" else ("SHFL",))),
    )


def _build_amax(scales: str, arch: int = 90) -> Build:
    """The kernel `amax` in bfloat16, as `cast.launch` does for both casts."""
    from ao_kernels.triton.cast import TILES, WARPS
    from ao_kernels.triton.kernels import cast

    pointers = {"x_ptr": "*bf16", "found_ptr": "*i32", "found_t_ptr": "*i32"}
    chosen = {"TILES": 2 * TILES, "SCALES": scales, "TRANSPOSED": True}
    aligned = (*pointers, "M", "N")
    return Build(cast.amax, {**pointers, "M": "i32", "N": "i32"}, chosen, arch, WARPS, 3, aligned)


def _amax_gate(budget: float, scales: str, arch: int = 90) -> Gate:
    """For 128 bytes that are read. A turn is over 64 × 128; warps find magnitudes together."""
    return Gate(
        f"sm_{arch} amax {scales} bf16 and transposed",
        partial(_build_amax, scales, arch),
        registers=64,
        shared=4096,
        conversions=1,
        work=64 * 128 * 2 / 128,
        budget=budget,
        holding=("LDG",),
        counts={"LDG": 4},
        absent=("I2F", "LDL", "STL"),
    )


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_SMALL, _MIDDLE, _LARGE = REGIMES
_ROW = EVEN[1]

#: those that CI checks in every change
GATES: tuple[Gate, ...] = (
    _gate(17.5, "int4", _SMALL, 128),
    _gate(15.5, "int4", _SMALL, 128, _FP16, _FP16),
    _gate(19.2, "int4", _SMALL, 64),
    _gate(20.0, "uint4", _SMALL, 128, zero_dtype=torch.uint8),
    _gate(24.0, "uint4", _SMALL, 64, zero_dtype=_BF16),
    _gate(24.6, "int4", _SMALL, 32),
    _gate(16.2, "int4", _SMALL, _ROW),
    _gate(19.1, "int4", _MIDDLE, 128),
    _gate(25.0, "int4", _LARGE, 128),
    _gate(17.5, "int4", _SMALL, 128, arch=80),
    _gate(17.5, "int4", _SMALL, 128, arch=89),
    _gate(0, "int4", _SMALL, 128, arch=100),
    _gate(18.4, "int4", _SMALL, 128, shape=RAGGED),
    _gate(29.5, "nf4", _SMALL, 64),
    _gate(10.8, "int8", _SMALL, _ROW, scale_dtype=_FP32),
    _gate(8.8, "int8", _SMALL, _ROW, _FP16, _FP32),
    _gate(12.8, "f8e4m3", _SMALL, _ROW, scale_dtype=_FP32),
    _adam_gate(35.5),
    _adam_gate(41.0, _FP32),
    _cast_gate(8.9, "tensor"),
    _cast_gate(15.7, "row"),
    _cast_gate(23.6, "block"),
    _gate(28.4, "int4", _SMALL, 128, sparse=True),
    _gate(34.4, "int4", _SMALL, 128, arch=80, sparse=True),
    *SPARSE,
)
#: the rest
MORE: tuple[Gate, ...] = (
    *(_amax_gate(18.2, scales, arch) for scales in ("tensor", "row") for arch in (90, 89)),
    _cast_gate(8.9, "given"),
    *(
        _cast_gate(most, scales, arch=89)
        for scales, most in (("tensor", 9.4), ("row", 16), ("block", 24))
    ),
    *(
        _cast_gate(27, scales, dtype)
        for scales in ("tensor", "row", "block")
        for dtype in (_FP16, _FP32)
    ),
    *(_cast_gate(27, scales, numbers="f8e5m2") for scales in ("tensor", "row", "block")),
    _cast_gate(10.2, "tensor", transposed=False),
    _cast_gate(13.9, "row", transposed=False),
    _cast_gate(14.6, "block", transposed=False),
    _adam_gate(90.0, stochastic=True),
    _adam_gate(34.5, _FP16),
    _adam_gate(37.0, arch=89),
    _gate(17.5, "int4", _SMALL, 128, scale_dtype=_FP32),
    _gate(17.2, "int4", _SMALL, 256),
    _gate(18.0, "int4", _SMALL, 64, _FP16, _FP16),
    _gate(34.2, "uint4", _SMALL, 32, zero_dtype=torch.uint8),
    _gate(16.2, "uint4", _SMALL, _ROW, zero_dtype=torch.uint8),
    _gate(23.2, "uint4", _MIDDLE, 128, zero_dtype=torch.uint8),
    _gate(34.0, "uint4", _LARGE, 128, zero_dtype=torch.uint8),
    _gate(46.5, "uint4", _LARGE, 64, zero_dtype=_BF16),
    _gate(29.5, "int4", _MIDDLE, 32),
    _gate(42.5, "int4", _LARGE, 32),
    _gate(28.0, "nf4", _SMALL, 128),
    _gate(29.5, "nf4", _SMALL, 64, _FP16, _FP16),
    _gate(39.7, "nf4", _LARGE, 64),
    _gate(12.8, "f8e4m3", _SMALL, _ROW, _FP16, _FP32),
    _gate(14.2, "int8", _LARGE, _ROW, scale_dtype=_FP32),
    _gate(16.0, "f8e4m3", _LARGE, _ROW, scale_dtype=_FP32),
    _gate(36.7, "int4", _SMALL, 32, sparse=True),
    _gate(32.2, "int4", _SMALL, 64, sparse=True),
    _gate(27.9, "int4", _SMALL, 256, sparse=True),
    _gate(26.4, "int4", _SMALL, _ROW, sparse=True),
    _gate(28.4, "int4", _SMALL, 128, _FP16, _FP16, sparse=True),
    _gate(30.9, "int4", _SMALL, 128, shape=RAGGED, sparse=True),
    _gate(31.0, "int4", _MIDDLE, 128, sparse=True),
    _gate(39.6, "int4", _LARGE, 128, sparse=True),
    _gate(62.0, "int4", _LARGE, 32, sparse=True),
    _gate(34.4, "int4", _SMALL, 128, arch=89, sparse=True),
    _gate(0, "int4", _SMALL, 128, arch=100, sparse=True),
    *MORE_SPARSE,
)

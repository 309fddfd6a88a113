"""Every setting that a matmul may be launched with is among those that checks compile."""

from __future__ import annotations

import torch

from ao_core.ext import registry
from ao_kernels.triton.attend.op import launch_shape
from ao_kernels.triton.bsr import launch as bsr
from ao_kernels.triton.bsr.layout import SIDES
from ao_kernels.triton.scaled_mm import launch as scaled_mm
from ao_kernels.triton.w4a8 import launch as w4a8
from ao_kernels.triton.w4a8.layout import tiling as w4a8_tiling
from ao_kernels.triton.weight_only import launch
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.layout import tiling
from kernel_checks import CHECKS, SLOW_CHECKS

WIDTHS = (128, 1024, 4096, 28672)
ROWS = (1, 16, 17, 33, 65, 130, 4096)


def compiled(kernel, *names):
    """What checks fix of a kernel: these constants, warps, stages and whether there are splits."""
    builds = (check.build() for check in (*CHECKS, *SLOW_CHECKS))
    return {
        (
            *(build.constexprs[name] for name in names),
            build.num_warps,
            build.num_stages,
            build.constexprs.get("SPLITS", 1) > 1,
        )
        for build in builds
        if build.kernel is kernel
    }


def test_planes():
    from ao_kernels.triton.weight_only import kernel

    found = compiled(kernel.linear, "PLANES", "ORDER", "SPARSE", "HAS_ZERO", "BLOCK_M")
    for numbers, sparse in (
        *((name, False) for name in ("int4", "uint4", "nf4", "f4e2m1", "int8", "f8e4m3")), ("int4", True)
    ):  # fmt: skip
        fmt = known(registry.dtypes.get(numbers), sparse=sparse)
        kind = (fmt.planes, fmt.order, fmt.sparse, fmt.offset != 0)
        for n in WIDTHS:
            for k in WIDTHS:
                tiles = tiling(n, k, 128, fmt)
                for m in ROWS:
                    for rows, warps, stages, splits in launch.launch_configs_of(tiles, m, 132):
                        assert (*kind, rows, warps, stages, splits > 1) in found


def test_planes_beside_activations_in_8_bits():
    from ao_kernels.triton.w4a8 import kernel

    found = compiled(kernel.linear, "HAS_ZERO", "BLOCK_M")
    for zero_point in (False, True):
        for n in WIDTHS:
            for k in WIDTHS:
                tiles = w4a8_tiling(n, k, 128)
                for m in ROWS:
                    for *how, splits in w4a8.launch_configs_of(
                        tiles, m, 132, zero_point=zero_point
                    ):
                        assert (zero_point, *how, splits > 1) in found


def test_blocks():
    from ao_kernels.triton.bsr import kernel

    found = compiled(kernel.linear, "SIDE", "BLOCK_M")
    for side in SIDES:
        for dtype in (torch.bfloat16, torch.float32):
            for m in ROWS:
                for blocks in (0, 10, 1000, 100000):
                    for rows, *how, splits in bsr.launch_configs_of(
                        side, m, dtype, blocks, 64, 132
                    ):
                        assert (side, rows, *how, splits > 1) in found


def test_scaled():
    from ao_kernels.triton.scaled_mm import kernel

    found = compiled(kernel.matmul, "BLOCK_M", "BLOCK_N", "PROMOTE")
    for m in ROWS:
        for promote in (False, True):
            for rows, cols, *how in scaled_mm.tile_configs_of(m, largest=not promote):
                assert (rows, cols, promote, *how, False) in found


def test_attention():
    from ao_kernels.triton.attend import kernel

    builds = (check.build() for check in (*CHECKS, *SLOW_CHECKS))
    found = {
        (*(each.constexprs[name] for name in ("BLOCK_M", "BLOCK_N", "SPLIT")), each.num_warps)
        for each in builds
        if each.kernel is kernel.attend
    }
    for rows in ROWS:
        for heads in (1, 8, 64, 1024):
            for memory in (128, 4096, 131072):
                shape = launch_shape(rows, heads, memory, 132)
                assert (shape.block_m, shape.block_n, shape.splits > 1, shape.warps) in found

"""Every setting that a product may be launched with is among those that gates compile."""

from __future__ import annotations

import torch

from ao_core.registry import registry
from ao_kernels.triton import act8, bsr, launch, plane32, scaled
from ao_kernels.triton.formats import known
from ao_kernels.triton.gates import GATES, MORE
from ao_kernels.triton.plane16 import tiling

WIDTHS = (128, 1024, 4096, 28672)
ROWS = (1, 16, 17, 33, 65, 130, 4096)


def gated(kernel, *names):
    """What gates fix of a kernel: these constants, warps, stages and whether there are splits."""
    builds = (gate.build() for gate in (*GATES, *MORE))
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
    from ao_kernels.triton.kernels import plane16

    found = gated(plane16.linear, "PLANES", "ORDER", "SPARSE", "HAS_ZERO", "ROWS")
    for numbers, sparse in (
        *((name, False) for name in ("int4", "uint4", "nf4", "f4e2m1", "int8", "f8e4m3")), ("int4", True)
    ):  # fmt: skip
        fmt = known(registry.dtypes.get(numbers), sparse=sparse)
        kind = (fmt.planes, fmt.order, fmt.sparse, fmt.offset != 0)
        for n in WIDTHS:
            for k in WIDTHS:
                tiles = tiling(n, k, 128, fmt)
                for m in ROWS:
                    for rows, warps, stages, splits in launch.settings_of(tiles, m, 132):
                        assert (*kind, rows, warps, stages, splits > 1) in found


def test_planes_beside_activations_in_8_bits():
    from ao_kernels.triton.kernels import plane32 as kernels

    found = gated(kernels.linear, "HAS_ZERO", "ROWS")
    for zero_point in (False, True):
        for n in WIDTHS:
            for k in WIDTHS:
                tiles = plane32.tiling(n, k, 128)
                for m in ROWS:
                    for *how, splits in act8.settings_of(tiles, m, 132, zero_point=zero_point):
                        assert (zero_point, *how, splits > 1) in found


def test_blocks():
    from ao_kernels.triton.kernels import bsr as kernels

    found = gated(kernels.linear, "SIDE", "ROWS")
    for side in bsr.SIDES:
        for dtype in (torch.bfloat16, torch.float32):
            for m in ROWS:
                for blocks in (0, 10, 1000, 100000):
                    for rows, *how, splits in bsr.settings_of(side, m, dtype, blocks, 64, 132):
                        assert (side, rows, *how, splits > 1) in found


def test_scaled():
    from ao_kernels.triton.kernels import scaled as kernels

    found = gated(kernels.product, "ROWS", "COLS", "PROMOTE")
    for m in ROWS:
        for promote in (False, True):
            for rows, cols, *how in scaled.regimes_of(m, largest=not promote):
                assert (rows, cols, promote, *how, False) in found

"""The order of CTAs: those that run together read the same weights, so M is the fastest dimension."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.ext import to_layout
from ao_core.ext.kernels import encode_parts
from ao_core.testing.base import gaussian
from ao_kernels.triton import w4a8, weight_only
from ao_kernels.triton.shared.tile_config import LaunchConfig, TileConfig
from ao_kernels.triton.w4a8 import launch as of_codes
from ao_kernels.triton.weight_only import op, op_experts

#: 3 blocks of N; tiles of 16 of M; 4 splits
N, K = 300, 1024
SETTING = LaunchConfig(TileConfig(16, 4, 4), 4)


@pytest.fixture
def grids(monkeypatch):
    """The grids of what is launched: kernels, which need Triton, are replaced by one that notes them."""
    found = []

    class Noting:
        def __getitem__(self, grid):
            found.append(grid)
            return lambda *args, **options: None

    for family, name in (
        (weight_only, "kernel"),
        (weight_only, "kernel_experts"),
        (w4a8, "kernel"),
    ):
        monkeypatch.setattr(family, name, SimpleNamespace(linear=Noting()), raising=False)
    return found


def weight(spec, layout, *experts):
    return to_layout(
        quantize_tensor(gaussian((*experts, N, K)), replace(spec, layout="packed")), layout
    )


def test_weight_only(grids):
    w = weight(Spec("int4", (1, 128), "float16"), "plane16")
    x = gaussian((20, K)).half()
    op.launch_linear(x, w.qdata, w.scale, None, w.table, None, N, K, 128, "int4", setting=SETTING)
    assert grids == [(2, 3, 4)]


def test_experts(grids):
    w = weight(Spec("int4", (1, 128), "float16"), "plane16", 2)
    x, offs = gaussian((20, K)).half(), torch.tensor([16, 20], dtype=torch.int32)
    op_experts.launch(x, w.qdata, w.scale, None, w.table, offs, N, K, 128, "int4", setting=SETTING)
    assert grids == [(op_experts.most_m_tiles(20, 2, 16), 3, 4)]


def test_w4a8(grids):
    act = Spec("int8", (1, WHOLE))
    w = weight(Spec("int4", (1, 128), "float16", act=act), "plane32")
    x = encode_parts(gaussian((20, K)), act)
    of_codes.launch(
        x["qdata"], x["scale"], None, w.qdata, w.scale, None, None, None,
        N, 128, "int4", torch.float16, setting=SETTING,
    )  # fmt: skip
    assert grids == [(2, 3, 4)]

"""Weights of experts in planes: what is held, which calls are taken; numbers are in proofs/interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import WHOLE, Call, Spec, quantize_tensor
from ao_core.ext import registry, repack, to_layout
from ao_core.ext.kernels import candidates, select
from ao_core.testing.base import gaussian, same_bits
from ao_core.testing.registered import registered
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.op_experts import (
    ends_of,
    groups_of,
    launch_config_for,
    most_m_tiles,
    plane16_grouped_linear,
)
from ao_kernels.triton.weight_only.records import plane16_grouped_linear as grouped_linear

GROUPED = registry.kernels.get("triton_plane16_grouped_linear")


def call(**changes):
    fields = {
        "op": "grouped_linear",
        "spec": Spec("int4", (1, 128), "bfloat16", layout="plane16"),
        "weight_shape": (8, 256, 512),
        "x_shape": (64, 512),
        "x_dtype": torch.bfloat16,
        "device": "cuda",
    }
    return Call(**{**fields, **changes})


@pytest.mark.parametrize(
    ("spec", "planes"),
    [
        (Spec("int4", (1, 1, 64), "float16", layout="packed"), "plane16"),
        (Spec("uint4", (1, 64), "float16", "int", "packed"), "plane16"),
        (Spec("nf4", (1, WHOLE), "float32", layout="packed"), "plane16"),
        (Spec("f8e4m3", (1, WHOLE), "float32"), "plane16_bytes"),
        (Spec("int4", (1, 64), "float16", layout="two_four"), "plane24"),
    ],
    ids=str,
)
def test_experts_lie_one_after_another(spec, planes):
    """The parts of each are those of its matrix, and the way back is bit for bit."""
    q = quantize_tensor(gaussian((3, 130, 300)), spec)
    there = to_layout(q, planes)
    back = to_layout(there, spec.layout)
    assert all(same_bits(back.parts[part], q.parts[part]) for part in q.part_names)
    for one, matrix in zip(there, q, strict=True):
        assert one.spec.layout == planes
        alone = to_layout(matrix, planes)
        assert all(same_bits(one.parts[part], alone.parts[part]) for part in alone.part_names)


def test_calls_that_are_refused():
    assert GROUPED.refuses(call()) is None
    assert GROUPED.refuses(call(x_shape=(0, 512))) is None
    assert GROUPED.refuses(call(x_shape=(8, 256, 512))) is None
    assert "float32" in GROUPED.refuses(call(x_dtype=torch.float32))
    many = GROUPED.refuses(call(x_shape=(8 * 512 + 1, 512)))
    assert "up to 512 rows of an expert on average, found 513" in many
    assert "tiles of 16 rows" in GROUPED.describe(call())
    assert "tiles of 64 rows" in GROUPED.describe(call(x_shape=(512, 512)))


def test_explained_where_it_is_not_chosen():
    found = {each.kernel.name: each.refusal for each in candidates(call(x_dtype=torch.float32))}
    assert found[GROUPED.name]  # without a device, that there is none
    assert "reference_grouped_linear" in found


def test_chosen_where_there_is_a_device():
    dense = registry.kernels.get("triton_plane16_dequantize")
    with registered(*(replace(each, unavailable=lambda: None) for each in (GROUPED, dense))):
        assert select(call()).name == GROUPED.name
        assert select(call(x_dtype=torch.float32)).name == "reference_grouped_linear"
        assert select(call(op="dequantize")).name == dense.name


def test_on_other_devices_weights_stay_as_they_are():
    w = gaussian((2, 256, 512)).bfloat16()
    q = quantize_tensor(w, Spec("int4", (1, 128), layout="packed"))
    assert repack(q).spec.layout != "plane16"


@pytest.mark.parametrize("shape", [(7, 300), (2, 5, 300)])
def test_the_op_knows_its_result_without_running(shape):
    q = quantize_tensor(gaussian((2, 140, 300)), Spec("int4", (1, 64), layout="packed"))
    w = to_layout(q, "plane16")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(shape, dtype=torch.bfloat16)
        offs = torch.empty(2, dtype=torch.int32) if len(shape) == 2 else None
        out = grouped_linear(x, w, offs)
        assert (out.shape, out.dtype) == ((*shape[:-1], 140), torch.bfloat16)
        rows = plane16_grouped_linear(
            x.reshape(-1, 300),
            w.qdata,
            w.scale,
            None,
            w.table,
            ends_of(x, offs),
            140,
            300,
            64,
            "int4",
        )
        assert rows.shape == (x.numel() // 300, 140)
        dense = torch.ops.ao_kernels.plane16_dequantize(
            w.qdata, w.scale, None, w.table, 140, 300, 64, "int4", torch.float16
        )
        assert dense.shape == (2, 140, 300)


@pytest.mark.parametrize(
    ("m", "experts", "rows", "tiles"),
    [(1, 8, 16, 1), (64, 128, 16, 64), (64, 8, 16, 12), (4096, 8, 64, 72), (9, 8, 16, 9)],
)
def test_how_many_tiles_are_launched(m, experts, rows, tiles):
    assert most_m_tiles(m, experts, rows) == tiles


def test_regimes_follow_the_average():
    tiles = tiling(4096, 4096, 128, known(registry.dtypes.get("int4")))
    found = [
        launch_config_for(tiles, m, 8, 132, zero_point=False).tile.block_m
        for m in (1, 128, 129, 256, 257, 4096)
    ]
    assert found == [16, 16, 32, 32, 64, 128]


def test_offsets():
    assert [groups_of(experts) for experts in (1, 7, 8, 128)] == [2, 8, 16, 256]
    ends = ends_of(torch.empty(3, 4, 8), None)
    assert (ends.tolist(), ends.dtype) == ([4, 8, 12], torch.int32)
    assert ends_of(torch.empty(0), ends) is ends

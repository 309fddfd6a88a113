"""The kernels of `plane16` in Triton's interpreter, on ragged shapes, against float64.

The interpreter has no inline assembly, whose twins in plain operations run here, and its bfloat16 is
wrong, so activations are in float16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.numerics import full_block
from ao_core.testing.base import gaussian
from ao_kernels.triton.shared.tile_config import LaunchConfig
from ao_kernels.triton.shared.workspace import split_k_workspace
from ao_kernels.triton.weight_only import op
from ao_kernels.triton.weight_only.launch import TILE_CONFIGS, tile_config_of

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

SPECS = (
    Spec("int4", (1, 128), "float16"),
    Spec("int4", (1, 32), "float32"),
    Spec("int4", (1, WHOLE), "float16"),
    Spec("uint4", (1, 64), "float16", "int"),
    Spec("uint4", (1, 32), "float32", "float"),
    Spec("uint4", (1, WHOLE), "float32", "int"),
    Spec("f4e2m1", (1, 32), "e8m0"),
    Spec("f4e2m1", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("nf4", (1, 64), Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("uint4", (1, 256), "e8m0", "int"),
    Spec("int8", (1, WHOLE), "float32"),
    Spec("int8", (1, 32), "e8m0"),
    Spec("f8e4m3", (1, 128), "float32"),
    Spec("int8", (1, WHOLE), "e4m3"),
    Spec("uint2", (1, 64), "float16", "int"),
    Spec("f6e3m2", (1, 32), "e8m0"),
)
#: the rest of the widths, with groups of other sizes
MORE = (
    *(Spec(f"int{bits}", (1, 64), "float16") for bits in (1, 2, 3, 5, 6, 7)),
    Spec("uint3", (1, WHOLE), "float32", "float"),
    Spec("uint8", (1, 128), "float16", "int"),
    Spec("ternary", (1, WHOLE), "float16"),
    Spec("f3e1m1", (1, 256), "float16"),
    Spec("f5e2m2", (1, 128), "float16"),
    Spec("f6e2m3", (1, 32), "float16"),
    Spec("f7e3m3", (1, 64), "float16"),
    Spec("f8e5m2", (1, WHOLE), "float32"),
)
EVERY = pytest.mark.parametrize(
    "spec", [*SPECS, *(pytest.param(spec, marks=pytest.mark.slow) for spec in MORE)], ids=str
)
#: rows and columns that tiles do not divide; less than a tile; tiles for several blocks
SHAPES = ((140, 300), (16, 70), (100, 520))


def weight(spec: Spec, shape: tuple[int, int]) -> QTensor:
    canonical, planes = ("packed", "plane16")
    if registry.dtypes.get(spec.dtype).bits == 8:
        canonical, planes = ("plain", "plane16_bytes")
    return to_layout(quantize_tensor(gaussian(shape), replace(spec, layout=canonical)), planes)


def operands(w: QTensor) -> tuple[object, ...]:
    return w.qdata, w.scale, w.parts.get("zero_point"), w.table


def sizes(w: QTensor) -> tuple[object, ...]:
    n, k = w.shape
    return n, k, full_block(w.spec.block, (n, k))[-1], w.spec.dtype


def kernel(op: str, w: QTensor):
    return registry.kernels.get(f"triton_{w.spec.layout}_{op}").fn


def test_the_interpreter_runs():
    assert triton.knobs.runtime.interpret


@EVERY
@pytest.mark.parametrize(
    "shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])]
)
def test_linear(spec, shape):
    w = weight(spec, shape)
    n, k = shape
    bias = gaussian((n,), seed=7).half()
    for m, splits in ((0, 1), (1, 1), (3, 2), (17, 2), (70, 1)):
        x = gaussian((m, k), seed=m).half()
        global_scale = w.parts.get("global_scale")
        # no launch has a split without a tile
        splits = min(splits, w.qdata.shape[1])
        setting = LaunchConfig(tile_config_of(m, zero_point="zero_point" in w.parts), splits)
        out = op.launch_linear(
            x, *operands(w), bias, *sizes(w), global_scale=global_scale, setting=setting
        )
        expected = x.double() @ w.dequantize(torch.float32).double().t() + bias.double()
        assert (out.shape, out.dtype) == ((m, n), torch.float16)
        assert (out.double() - expected).norm() <= 5e-4 * expected.norm()


@pytest.mark.parametrize("config", TILE_CONFIGS, ids=str)
def test_every_tile(config):
    """Tiles of 256 of N end beyond the last one of the layout here, and split K as the last rows do."""
    w, x = weight(SPECS[4], (300, 520)), gaussian((40, 520)).half()
    expected = x.double() @ w.dequantize(torch.float32).double().t()
    for splits in (1, 3):
        out = op.launch_linear(
            x, *operands(w), None, *sizes(w), setting=LaunchConfig(config, splits)
        )
        assert (out.double() - expected).norm() <= 5e-4 * expected.norm()


@pytest.mark.parametrize("config", TILE_CONFIGS[:2], ids=str)
def test_split_k_writes_nothing_beyond_the_result(monkeypatch, config):
    """Partial sums of rows that there are not stay as they were: few rows would else cost whole tiles."""
    guarded = []

    def workspace(*arguments):
        partial, semaphores = split_k_workspace(*arguments)
        guarded.append(partial.fill_(torch.nan))
        return partial, semaphores

    monkeypatch.setattr(op, "split_k_workspace", workspace)
    (n, k), m, splits = (140, 520), 3, 2
    w, x = weight(SPECS[0], (n, k)), gaussian((m, k)).half()
    out = op.launch_linear(x, *operands(w), None, *sizes(w), setting=LaunchConfig(config, splits))
    assert out.isfinite().all()
    (partial,) = guarded
    blocks = -(-n // config.block_n)
    parts = partial.view(blocks, splits, config.block_n, config.block_m).transpose(0, 1)
    written = parts.reshape(splits, blocks * config.block_n, config.block_m).isfinite()
    assert written[:, :n, :m].all()
    assert written.sum() == splits * n * m


@EVERY
def test_dequantize(spec):
    """Bit for bit what the reference gives."""
    for shape, dtype in zip(SHAPES[:2], (torch.float32, torch.float16), strict=True):
        w = weight(spec, shape)
        dense = kernel("dequantize", w)(w.parts, w.spec, shape, dtype)
        assert torch.equal(dense, w.canonical().dequantize(dtype))


@EVERY
def test_embedding(spec):
    """Bit for bit rows of what the reference gives; those that there are not are NaN."""
    w = weight(spec, SHAPES[0])
    dense = w.canonical().dequantize()
    ids = torch.tensor([[0, 139, 128, 5, 5], [127, 64, 1, 2, 3]])
    lookup = kernel("embedding", w)
    assert torch.equal(lookup(ids, w), dense[ids])
    found = lookup(torch.tensor([3, -1, 140], dtype=torch.int32), w)
    assert torch.equal(found[0], dense[3])
    assert found[1:].isnan().all()
    assert lookup(ids[:, :0], w).shape == (2, 0, 300)


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3]], ids=str)
def test_inputs_of_any_rank_and_stride(spec):
    w = weight(spec, (140, 300))
    linear = kernel("linear", w)
    x = gaussian((2, 3, 300)).half()
    out = linear(x, w, None)
    assert out.shape == (2, 3, 140)
    assert torch.equal(linear(x[0, 0], w, None), out[0, 0])
    wider = torch.cat([x, x], -1)[..., 7:307]
    assert torch.equal(linear(wider, w, None), linear(wider.contiguous(), w, None))
    strided = x[0].t().contiguous().t()
    assert torch.equal(linear(strided, w, None), linear(x[0], w, None))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf * 0
def test_what_is_not_finite_stays_in_its_row():
    w = weight(SPECS[0], (16, 70))
    x = gaussian((3, 70)).half()
    x[1, 69] = torch.inf
    out = kernel("linear", w)(x, w, None)
    finite = out.isfinite().all(-1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("spec", "global_scale"), [(SPECS[0], None), (SPECS[3], torch.tensor([0.5]))], ids=["", "all"]
)
def test_custom_ops(spec, global_scale):
    """Schema, fake implementations and registration, for `torch.compile`.

    The check of schemas cannot compare float8, so other scales have a scale here.
    """
    w = weight(spec, (16, 70))
    x = gaussian((2, 3, 70)).half()
    last = False, global_scale
    for each, args in (
        (torch.ops.ao_kernels.plane16_linear, (x, *operands(w), None, *sizes(w), *last)),
        (torch.ops.ao_kernels.plane16_dequantize, (*operands(w), *sizes(w), torch.float32, *last)),
        (
            torch.ops.ao_kernels.plane16_embedding,
            (torch.tensor([3, 1]), *operands(w), *sizes(w), torch.float32, *last),
        ),
    ):
        results = torch.library.opcheck(each, args)
        assert set(results.values()) == {"SUCCESS"}, results

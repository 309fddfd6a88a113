"""Matmuls of operands in 8 bits in Triton's interpreter, on ragged shapes, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.kernels import decode_parts, encode_parts
from ao_core.testing.base import gaussian
from ao_kernels.triton.scaled_mm import launch as module
from ao_kernels.triton.scaled_mm.launch import TILE_CONFIGS, launch, scaled_matmul
from ao_kernels.triton.scaled_mm.records import (
    grouped_linear,
    grouped_mm,
    linear,
    linear_with_sums,
    mm,
)

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

TENSOR, ROW, GROUP, SQUARE = (WHOLE, WHOLE), (1, WHOLE), (1, 128), (128, 128)
KINDS = {TENSOR: "one", ROW: "row", GROUP: "block", SQUARE: "square"}


def decoded(x, spec):
    """The numbers of the codes of x, in float64."""
    return decode_parts(encode_parts(x, spec), spec, tuple(x.shape), torch.float64)


def near(out, expected, bound):
    assert out.shape == expected.shape
    assert (out.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize(
    ("numbers", "blocks", "config", "fast_accum"),
    [
        (("f8e4m3", "f8e4m3"), (ROW, ROW), 0, True),
        (("f8e5m2", "f8e4m3"), (TENSOR, TENSOR), 1, True),
        (("f8e4m3", "f8e5m2"), (TENSOR, ROW), 2, False),
        (("f8e5m2", "f8e5m2"), (ROW, ROW), 3, False),
        (("f8e4m3", "f8e4m3"), (GROUP, SQUARE), 1, True),
        (("f8e5m2", "f8e4m3"), (GROUP, GROUP), 2, True),
        (("f8e4m3", "f8e4m3"), (GROUP, GROUP), 3, True),
        (("int8", "int8"), (ROW, ROW), 0, True),
        (("int8", "int8"), (ROW, TENSOR), 2, True),
    ],
    ids=str,
)
def test_every_kind_of_scales(numbers, blocks, config, fast_accum, tma):
    specs = [Spec(*each) for each in zip(numbers, blocks, strict=True)]
    m, n, k = 140, 150, 300
    x = [
        gaussian((rows, k), seed=rows) * torch.exp2(gaussian((rows, 1), seed=rows + 1))
        for rows in (m, n)
    ]
    parts = [encode_parts(*each) for each in zip(x, specs, strict=True)]
    bias = gaussian((n,), seed=7)
    out = launch(
        *(each[name] for name in ("qdata", "scale") for each in parts),
        *(KINDS[block] for block in blocks), torch.float32, bias=bias, fast_accum=fast_accum,
        config=TILE_CONFIGS[config], tma=tma,
    )  # fmt: skip
    near(out, decoded(x[0], specs[0]) @ decoded(x[1], specs[1]).t() + bias.double(), 1e-6)


@pytest.mark.parametrize("shape", [(1, 16, 70), (3, 5, 1), (130, 33, 128), (17, 260, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mm(shape, dtype):
    """Sizes that no tile divides; transposed operands, and such as are cast already."""
    (m, n, k), spec = shape, Spec("f8e4m3", ROW, act=Spec("f8e5m2", ROW))
    a, b = gaussian((k, m)).to(dtype).t(), gaussian((n, k), seed=1).to(dtype)
    expected = decoded(a, spec.act) @ decoded(b, replace(spec, act=None)).t()
    out = mm(a, b, spec)
    assert out.dtype == dtype
    near(out, expected, 1e-6 if dtype == torch.float32 else 5e-4)
    cast = quantize_tensor(a, spec.act), quantize_tensor(b, replace(spec, act=None))
    assert torch.equal(mm(*cast, spec), out)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["symmetric", "zero_point", "static"])
def test_integers_have_the_bits_of_torch(act, bias):
    """Sums are exact in int32, and what follows is done in the same order."""
    spec, given = Spec("int8", ROW, act=Spec("int8", ROW)), {}
    if act == "zero_point":
        spec = replace(spec, act=Spec("uint8", ROW, zero_point="int"))
    elif act == "static":
        spec = replace(spec, act=Spec("uint8", TENSOR, zero_point="int", static=True))
        given = {"act_scale": 0.03, "act_zero_point": 77}
    w = quantize_tensor(gaussian((70, 200)), spec, **given)
    x, b = gaussian((2, 9, 200), seed=1) + 0.5, gaussian((70,), seed=2) if bias else None
    of_torch = registry.kernels.get("int_mm").fn(x, w, b)
    assert torch.equal(linear(x, w, b), of_torch)


class SumsOfCodes(TorchDispatchMode):
    """Counts how often rows of an int8 matrix are added up."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._opname == "sum" and args[0].dtype == torch.int8
        return func(*args, **(kwargs or {}))


def test_weights_that_bring_the_sums_of_their_rows_are_read_once(monkeypatch):
    """Adding them up in each call gives the same numbers, and reads the weight once more."""
    monkeypatch.setattr(module, "scaled_matmul", launch)  # a mode does not see inside of an op
    plain = quantize_tensor(
        gaussian((70, 200)), Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int"))
    )
    x, w = gaussian((9, 200), seed=1) + 0.5, to_layout(plain, "row_sums")
    with SumsOfCodes() as of_plain:
        expected = linear(x, plain, None)
    with SumsOfCodes() as of_sums:
        found = linear_with_sums(x, w, None)
    assert torch.equal(found, expected)
    assert (of_plain.count, of_sums.count) == (1, 0)


@pytest.mark.parametrize("block", [(ROW, ROW), (GROUP, SQUARE)])
def test_experts(block):
    """Some have no row, and some rows no expert, whatever stands in them."""
    spec = Spec("f8e4m3", block[1], act=Spec("f8e4m3", block[0]))
    ends = torch.tensor([0, 70, 70, 73, 90], dtype=torch.int32)
    x, w = gaussian((100, 140)), gaussian((5, 140, 140), seed=1)
    x[95], w[0] = torch.nan, torch.nan
    out = grouped_mm(x, w, ends, spec)
    assert torch.equal(out[90:], torch.zeros(10, 140))
    a, b = decoded(x, spec.act), decoded(w, replace(spec, act=None))
    for expert, (start, end) in enumerate(((0, 0), (0, 70), (70, 70), (70, 73), (73, 90))):
        if end > start:
            near(out[start:end], a[start:end] @ b[expert].t(), 1e-6)
    weight = quantize_tensor(w.nan_to_num(), spec)
    assert torch.equal(grouped_linear(x, weight, ends), out)


def test_a_batch_of_experts():
    spec = Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int"))
    x, w = gaussian((3, 20, 50)) + 0.3, gaussian((3, 40, 50), seed=1)
    out = grouped_mm(x, w, None, spec)
    for expert in range(3):
        same = mm(x[expert], w[expert], spec)
        assert torch.equal(out[expert], same)


def test_what_is_not_finite_stays_in_its_row():
    a, b = gaussian((70, 300)), gaussian((30, 300), seed=1)
    a[3, 299], b[5, 0] = torch.nan, torch.nan
    out = mm(a, b, Spec("f8e4m3", ROW, act=Spec("f8e4m3", ROW)))
    expected = torch.zeros(70, 30, dtype=torch.bool)
    expected[3], expected[:, 5] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("grouped", [False, True])
def test_custom_op(grouped):
    """Schema, fake implementation and registration, for `torch.compile`."""
    spec = Spec("int8", ROW)  # torch's own checks do arithmetic that float8 has not
    a, b = encode_parts(gaussian((10, 40)), spec), encode_parts(gaussian((20, 40)), spec)
    args = [a["qdata"], b["qdata"], a["scale"], b["scale"], "row", "row", torch.float16]
    if grouped:
        args[1], offs = b["qdata"].view(2, 10, 40), torch.tensor([3, 10], dtype=torch.int32)
        args += [None, None, offs]
    results = torch.library.opcheck(scaled_matmul, tuple(args))
    assert set(results.values()) == {"SUCCESS"}, results

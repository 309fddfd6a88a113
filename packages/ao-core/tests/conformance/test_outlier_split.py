"""A stranger's composite format: columns of outliers in bfloat16, and codes of any format for the others.

All that reads or writes dense values has to go through the layout's own `encode` and `decode`: what knows
of codes, scales and zero points alone loses the outliers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ao_core
from ao_core import Kernel, Spec, WeightOnlyConfig, load_model, quantize_tensor, save_model
from ao_core.layouts import SHARED, Packed, PartAxis
from ao_core.numerics import sqnr
from ao_core.testing import KernelSuite, LayoutSuite, TransformSuite
from ao_core.testing.base import gaussian
from ao_core.testing.registered import registered
from ao_core.testing.transforms import SUBJECTS

COLUMNS = 2


class OutlierSplit(Packed):
    """`packed`, and: outliers, bfloat16 [N, 2], the columns of greatest magnitude; columns, int32 [2]."""

    name = "outlier_split"
    affine = False

    def refuses(self, spec, shape, dtype):
        if len(shape) != 2 or shape[1] < 8:
            return f"needs a matrix of at least 8 columns, found {shape}"
        if not dtype.has_scale:
            return f"splits off what spoils scales, and {dtype.name} has none"
        return super().refuses(spec, shape, dtype)

    def encode(self, values, spec, dtype, quantize):
        magnitude = F.pad(values.float().abs(), (0, 0, 0, 1)).amax(0)  # there may be no rows
        columns = magnitude.topk(COLUMNS).indices.sort().values
        parts = super().encode(values.index_fill(1, columns, 0), spec, dtype, quantize)
        outliers = values.index_select(1, columns).to(torch.bfloat16)
        return {**parts, "outliers": outliers, "columns": columns.int()}

    def decode(self, parts, spec, shape, dtype, out_dtype=torch.float32):
        dense = super().decode(parts, spec, shape, dtype)
        outliers = parts["outliers"].float()
        return dense.index_copy(1, parts["columns"].long(), outliers).to(out_dtype)

    def geometry(self, spec, shape, dtype):
        more = {"outliers": (PartAxis(1, 1),), "columns": (SHARED,)}
        return super().geometry(spec, shape, dtype) | more


def outlier_linear(x, w, bias):
    """The matmul with the codes, corrected by that with what the outliers differ from them."""
    base = w.layout_record
    codes = Packed.decode(base, w.parts, w.spec, w.stored_shape, w.format, x.dtype)
    columns = w.columns.long()
    more = w.outliers.to(x.dtype) - codes.index_select(1, columns)
    out = F.linear(x, codes) + F.linear(x.index_select(-1, columns), more)
    return out if bias is None else out + bias


LAYOUT = OutlierSplit()
KERNEL = Kernel(
    "outlier_linear", "linear", "outlier_split", "cpu", outlier_linear, 1,
    refuses=lambda call: "does not quantize activations" if call.spec.act else None,
)  # fmt: skip
RECORDS = (LAYOUT, KERNEL)
SPEC = Spec("nf4", (1, 32), "bfloat16", layout="outlier_split")


class TestLayout(LayoutSuite):
    records = RECORDS
    layout = "outlier_split"
    specs = (SPEC, Spec("uint5", (1, 16), "float16", zero_point="int"))
    shapes = ((16, 64), (33, 170), (0, 16))


class TestKernel(KernelSuite):
    records = RECORDS
    kernel = "outlier_linear"
    specs = (SPEC, Spec("int4", (1, 32)))


class TestTransform(TransformSuite):
    records = RECORDS
    config = WeightOnlyConfig("nf4", 32, layout="outlier_split")
    sqnr_range = (15.0, 35.0)
    subjects = SUBJECTS[:2]


@pytest.fixture(autouse=True, scope="module")
def plugin(own_records):
    with registered(*RECORDS):
        yield


def weight():
    """What the format is for: two columns that are far greater than the others."""
    w = gaussian((48, 64))
    w[:, [5, 40]] *= 50
    return w


def test_outliers_are_kept_wherever_values_are_read_or_written():
    w, x = weight(), gaussian((3, 64), seed=1)
    plain = quantize_tensor(w, Spec("nf4", (1, 32), "bfloat16", layout="packed"))
    q = quantize_tensor(w, SPEC)
    others = [i for i in range(64) if i not in (5, 40)]
    assert torch.equal(q.dequantize()[:, [5, 40]], w[:, [5, 40]].bfloat16().float())
    errors = [float(sqnr(w[:, others], t.dequantize()[:, others])) for t in (plain, q)]
    assert errors[0] + 8 < errors[1]

    expected = F.linear(x, q)
    with ao_core.kernels("reference"):
        torch.testing.assert_close(F.linear(x, q), expected, atol=1e-3, rtol=1e-5)

    values = q.dequantize()
    for change in (
        lambda t: t.copy_(values),
        lambda t: t.add_(torch.zeros_like(values)),
        lambda t: t.mul_(1.0),
    ):
        again = quantize_tensor(gaussian((48, 64), seed=2), SPEC)
        again.copy_(q)
        change(again)
        assert float(sqnr(values, again.dequantize())) > 60


@pytest.mark.parametrize("scale_method", ["mse", "hqq"])
def test_scales_are_chosen_for_what_the_codes_hold(scale_method):
    """The search sees the values without the outliers, so it is no worse than absmax."""
    w = weight()
    spec = Spec("int4", (1, 32), layout="outlier_split")
    errors = [
        float(sqnr(w, quantize_tensor(w, spec, scale_method=s).dequantize()))
        for s in ("absmax", scale_method)
    ]
    assert errors[0] < errors[1]


def test_life_of_a_layer(tmp_path):
    """Saved, loaded and compiled: the same values."""
    layer = nn.Linear(64, 48)
    layer.weight = nn.Parameter(quantize_tensor(weight(), SPEC), requires_grad=False)
    x = gaussian((3, 64), seed=1)
    save_model(layer, tmp_path)
    fresh = nn.Linear(64, 48)
    load_model(fresh, tmp_path)
    assert torch.equal(fresh(x), layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))

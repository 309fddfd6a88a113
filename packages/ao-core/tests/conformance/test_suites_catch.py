"""The suites fail where they should: each defect below is caught by the test that is named beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core.dtypes import int_dtype, lut_dtype
from ao_core.errors import AoError
from ao_core.layouts import PartAxis, Plain
from ao_core.numerics import error_sums
from ao_core.registry import Registry, registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor.codec import decode_reference
from ao_core.tensor.encoding import encode_reference
from ao_core.testing import DTypeSuite, KernelSuite, LayoutSuite, OptimizerSuite
from ao_core.testing.kernels import KernelCase
from ao_core.testing.samples import Sample

CAUGHT = (AssertionError, AoError, RuntimeError, pytest.fail.Exception)
INT4 = int_dtype("int4", 4)


def suite_of(record):
    """The suite for a number format that nobody registered."""
    return type("Suite", (DTypeSuite,), {"dtype": record.name, "format": record})()


def half_up(x):
    codes = torch.floor(x.float().nan_to_num(0.0) + 0.5).clamp(-8, 7)
    return codes.to(torch.int8).view(torch.uint8) & 15


def wrapping(x):
    return torch.round(x.float().nan_to_num(0.0)).to(torch.int64).to(torch.uint8) & 15


def in_place(x):
    return INT4.encode(x.mul_(1.0) if x.dtype == torch.float64 else x.add_(0.25))


def with_item(x):
    return INT4.encode(x) if float(x.sum()) > -1e9 else INT4.encode(-x)


@pytest.mark.parametrize(
    ("defect", "test", "args"),
    [
        ({"encode": half_up}, "test_rounds_to_nearest", ("cpu",)),
        ({"encode": half_up}, "test_rounds_every_bfloat16", ("cpu",)),
        ({"encode": wrapping}, "test_saturates", ("cpu",)),
        ({"encode": in_place}, "test_shapes", ((3, 5), "cpu")),
        ({"encode": with_item}, "test_compiles", ()),
        ({"encode": lambda x: INT4.encode(x).int()}, "test_shapes", ((7,), "cpu")),
        ({"encode": lambda x: INT4.encode(x * 0.9)}, "test_decode_then_encode_keeps_every_value", ("cpu",)),
        ({"decode": lambda c: INT4.decode(c) + 1}, "test_decodes_as_others_do", ()),
        ({"decode": lambda c: -INT4.decode(c)}, "test_values_in_order", ()),
        ({"max": 8}, "test_record_is_consistent", ()),
        ({"quant_max": 80.0}, "test_record_is_consistent", ()),
        ({"summary": ""}, "test_record_is_consistent", ()),
    ],
)  # fmt: skip
def test_number_formats(defect, test, args):
    good = suite_of(INT4)
    getattr(good, test)(*args)
    with pytest.raises(CAUGHT):
        getattr(suite_of(replace(INT4, **defect)), test)(*args)


def test_quality_has_a_floor_and_a_ceiling(monkeypatch):
    """A format that wastes its codes, and one that is better than information allows."""
    values = [-1.0, -0.001, *(i * 1e-5 for i in range(13)), 1.0]
    wasteful = lut_dtype("wasteful", values)
    honest = registry.dtypes.get

    def get(name):
        return wasteful if name == "wasteful" else honest(name)

    monkeypatch.setattr(registry.dtypes, "get", get)
    with pytest.raises(AssertionError):
        suite_of(wasteful).test_quality_on_gaussian_data("cpu")
    monkeypatch.setattr("ao_core.testing.dtypes.sqnr", lambda a, b: torch.tensor(60.0))
    with pytest.raises(AssertionError):
        suite_of(INT4).test_quality_on_gaussian_data("cpu")


class WrongGeometry(Plain):
    """Says that rows come in pairs of one entry, which they do not."""

    def geometry(self, spec, shape, dtype):
        grid = super().geometry(spec, shape, dtype)
        return {**grid, "qdata": (PartAxis(1, 1), PartAxis(2, 1))}


class Forgetful(Plain):
    """Loses the last code of every row."""

    def unpack(self, parts, spec, shape, dtype):
        codes, scale, zero_point = super().unpack(parts, spec, shape, dtype)
        codes = codes.clone()
        codes[..., -1] = 0
        return codes, scale, zero_point


@pytest.mark.parametrize(
    ("layout", "tests"),
    [
        (WrongGeometry, ["test_geometry_describes_the_parts", "test_slice_and_narrow"]),
        (Forgetful, ["test_pack_unpack", "test_same_values_as_in_plain"]),
    ],
)
def test_layouts(layout, tests, monkeypatch):
    record = layout()
    record.name = layout.__name__
    honest = registry.layouts.get
    monkeypatch.setattr(
        registry.layouts, "get", lambda name: record if name == record.name else honest(name)
    )
    for name in tests:
        good = type("Suite", (LayoutSuite,), {"layout": "plain"})()
        getattr(good, name)(Sample(Spec("int8", (1, WHOLE)), (4, 8)))
        suite = type("Suite", (LayoutSuite,), {"layout": record.name})()
        with pytest.raises(CAUGHT):
            getattr(suite, name)(Sample(Spec("int8", (1, WHOLE), layout=record.name), (4, 8)))


def test_kernels():
    reference = registry.kernels.get("reference_linear")

    def suite(**changes):
        record = replace(reference, layout="plain", **changes)
        fields = {"kernel": reference.name, "record": record}
        made = type("Suite", (KernelSuite,), fields)()
        return made, made.arguments()["case"][0]

    good, case = suite()
    good.test_results(case)
    good.test_reasons_are_sentences()
    sloppy, case = suite(fn=lambda x, w, b: reference.fn(x, w, b) * 1.01)
    with pytest.raises(AssertionError, match="relative error"):
        sloppy.test_results(case)
    curt, _ = suite(refuses=lambda call: "no" if call.m > 2 else None)
    with pytest.raises(AssertionError, match="not a sentence"):
        curt.test_reasons_are_sentences()
    rigid, case = suite(fn=lambda x, w, b: reference.fn(x.view(-1, x.shape[-1]), w, b))
    with pytest.raises(CAUGHT):
        rigid.test_results(case)


def rounded_twice(parts, spec, shape, dtype):
    return decode_reference(parts, spec, shape, torch.float16).to(dtype)


def one_code_off(x, spec):
    parts = encode_reference(x, spec)
    parts["qdata"].view(torch.uint8).view(-1)[-1:] ^= 1
    return parts


def without_last_row(x, w, step):
    return error_sums(x[:-1:step], w.dequantize()[:-1:step])


def in_place_scale(parts, spec, shape, dtype):
    parts["scale"].mul_(1.0)
    parts["qdata"].view(torch.uint8).zero_()
    return decode_reference(parts, spec, shape, dtype)


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("reference_quantize", one_code_off),
        ("reference_dequantize", rounded_twice),
        ("reference_dequantize", in_place_scale),
        ("reference_error_sums", without_last_row),
    ],
)
def test_conversions(name, fn):
    reference = registry.kernels.get(name)

    def suite(**changes):
        record = replace(reference, layout="packed", **changes)
        made = type("Suite", (KernelSuite,), {"kernel": name, "record": record})()
        spec = Spec("int4", (1, 32), "bfloat16", layout="packed")
        return made, KernelCase((spec,), (16, 64), torch.bfloat16, "cpu")

    good, case = suite()
    good.test_results(case)
    bad, case = suite(fn=fn)
    with pytest.raises(AssertionError):
        bad.test_results(case)


class Amnesiac(torch.optim.SGD):
    """Keeps a moving step outside of its state."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["momentum"] = 0.0
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(self.count)
        return super().step(closure)


def test_optimizers(tmp_path):
    suite = type("Suite", (OptimizerSuite,), {"optimizer": Amnesiac})()
    with pytest.raises(AssertionError):
        suite.test_state_dict(False, tmp_path)
    slow = type("Suite", (OptimizerSuite,), {"optimizer": torch.optim.SGD, "rates": (1e-5,)})()
    with pytest.raises(AssertionError, match="learning rates"):
        slow.test_converges(torch.float32)


def test_registry_is_untouched():
    assert isinstance(registry, Registry)
    assert "wasteful" not in registry.dtypes

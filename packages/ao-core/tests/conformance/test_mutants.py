"""Records with one defect each: the suite fails at the test that is named, and passes without the defect.

The defects that a plugin is most likely to have are in `tests/plugins/test_suites_fail.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ao_core import Kernel, Recipe, ScaleMethod, Spec, Transform, WeightOnlyConfig
from ao_core.config import Config
from ao_core.dtypes import int_dtype, lut_dtype
from ao_core.errors import AoError
from ao_core.layouts import SHARED, Packed, PartAxis
from ao_core.numerics import choose_qparams, pack_bits, unpack_bits
from ao_core.registry import registry
from ao_core.testing import DTypeSuite, KernelSuite, LayoutSuite, ScaleSuite
from ao_core.testing.base import Untried, _arguments_of, run
from ao_core.testing.providers import suites_of
from ao_core.testing.registered import registered

CAUGHT = (AssertionError, AoError, RuntimeError, TypeError, pytest.fail.Exception)


def check(base, fields, good, bad, test, match=None):
    """The suite passes with the good record and fails with the bad one."""
    for record in (good, bad):
        suite = type("Suite", (base,), {**fields(record), "records": (record,)})
        with registered(record):
            if record is good:
                run(suite, test)
                continue
            with pytest.raises(CAUGHT, match=match):
                run(suite, test)


# -- number formats ------------------------------------------------------------------------------

THIRDS = lut_dtype("thirds", [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
INT5 = replace(int_dtype("int5", 5), name="mine5")


def half_down(x):
    return INT5.encode(torch.ceil(x.float().nan_to_num(0.0) - 0.5))


def spoils(x):
    return INT5.encode(torch.zeros_like(x) if bool(x.isnan().any()) else x)


def upper(x):
    return 6 - THIRDS.encode(-x.float())


def away(x):
    return torch.where(x < 0, THIRDS.encode(x), upper(x))


@pytest.mark.parametrize(
    ("good", "defect", "test"),
    [
        (
            INT5,
            {"encode": half_down},
            "test_rounds_to_nearest",
        ),
        (THIRDS, {"encode": upper}, "test_rounds_to_nearest"),
        (THIRDS, {"encode": away}, "test_rounds_to_nearest"),
        (INT5, {"encode": lambda x: INT5.encode(x.nan_to_num_(0.0))}, "test_shapes"),
        (INT5, {"encode": lambda x: INT5.encode(x.clamp_(-100, 100))}, "test_shapes"),
        (INT5, {"decode": lambda codes: INT5.decode(codes.clamp_(max=3))}, "test_shapes"),
        (
            INT5,
            {"encode": spoils},
            "test_nan",
        ),
        (INT5, {"rounds_to_zero": False}, "test_rounds_to_nearest"),
    ],
)
def test_number_formats(good, defect, test):
    check(DTypeSuite, lambda r: {"dtype": r.name}, good, replace(good, **defect), test)


# -- layouts -------------------------------------------------------------------------------------


def layout(base, **methods):
    """A layout like `base`, by another name and with these methods."""
    return type("Mine", (base,), {"name": "mine", **methods})()


class Native(Packed):
    """The bytes of `packed` backwards, for a kernel."""

    name = "mine"
    canonical = False
    canonical_name = "packed"

    def from_canonical(self, parts, spec, shape, dtype):
        return {**parts, "qdata": parts["qdata"].flip(-1)}

    to_canonical = from_canonical

    def geometry(self, spec, shape, dtype):
        return super(Packed, self).geometry(spec, shape, dtype)


def loses_tail(self, codes, scale, zero_point, spec, dtype):
    if (k := codes.shape[-1]) > 100 and k % 32:
        codes = codes.clone()
        codes[..., k - k % 32 :] = 0
    return Packed.pack(self, codes, scale, zero_point, spec, dtype)


def loses_top_bit(self, parts, spec, shape, dtype):
    found = Native.from_canonical(self, parts, spec, shape, dtype)
    if dtype.bits == 7:
        codes = unpack_bits(found["qdata"], 7, shape[-1]) & 63
        found["qdata"] = pack_bits(codes, 7)
    return found


class Split(Packed):
    """The greatest column in float32, next to the codes of the others."""

    name = "mine"
    affine = False

    def refuses(self, spec, shape, dtype):
        return None if len(shape) == 2 and shape[1] > 1 and dtype.has_scale else "needs a matrix"

    def encode(self, values, spec, dtype, quantize):
        column = F.pad(values.abs(), (0, 0, 0, 1)).amax(0).argmax().reshape(1)
        parts = super().encode(values.index_fill(1, column, 0), spec, dtype, quantize)
        return {**parts, "outlier": values.index_select(1, column).float(), "column": column}

    def decode(self, parts, spec, shape, dtype, out_dtype=torch.float32):
        dense = super().decode(parts, spec, shape, dtype)
        return dense.index_copy(1, parts["column"], parts["outlier"]).to(out_dtype)

    def geometry(self, spec, shape, dtype):
        more = {"outlier": (PartAxis(1, 1),), "column": (SHARED,)}
        return super().geometry(spec, shape, dtype) | more


def no_outliers(self, parts, spec, shape, dtype, out_dtype=torch.float32):
    return Packed.decode(self, parts, spec, shape, dtype, out_dtype)


def doubled_outliers(self, values, spec, dtype, quantize):
    parts = Split.encode(self, values, spec, dtype, quantize)
    return {**parts, "outlier": 2 * parts["outlier"]}


@pytest.mark.parametrize(
    ("base", "defect", "test"),
    [
        (Packed, {"pack": loses_tail}, "test_every_width_of_code"),
        (Native, {"to_canonical": loses_top_bit}, "test_every_width_of_code"),
        (Split, {"decode": no_outliers}, "test_same_values_as_in_plain"),
        (Split, {"encode": doubled_outliers}, "test_pack_unpack"),
    ],
)
def test_layouts(base, defect, test):
    specs = (Spec("int4", (1, 32)), Spec("nf4", (1, 16)))
    fields = {"layout": "mine", "specs": specs, "shapes": ((16, 64), (5, 70))}
    check(LayoutSuite, lambda r: fields, layout(base), layout(base, **defect), test)


# -- kernels -------------------------------------------------------------------------------------


def matmul(x, w, bias):
    """A correct kernel."""
    return F.linear(x, w.dequantize(x.dtype), bias)


def only(condition, change):
    """A kernel that is correct unless `condition(x, w)`."""

    def fn(x, w, bias):
        out = matmul(x, w, bias)
        return change(out) if condition(x, w) else out

    return fn


def few_rows(call):
    if call.spec.act is not None:
        return "does not quantize activations"
    return None if call.m <= 4 else f"takes 4 rows at most, found {call.m}"


def without_nested(call):
    nested = call.spec.act is not None or isinstance(call.spec.scale_dtype, Spec)
    return (
        "takes no activations in codes and no scales that are quantized themselves"
        if nested
        else None
    )


def transposed_strides(out):
    return out.t().contiguous().t() if out.dim() == 2 else out


def writes_x(x, w, bias):
    out = matmul(x, w, bias)
    x.add_(1)
    return out


KERNELS = [
    (only(lambda x, w: x.dtype == torch.float16, torch.Tensor.float), few_rows),
    (only(lambda x, w: x.dtype == torch.bfloat16, torch.Tensor.float), few_rows),
    (only(lambda x, w: x.dim() == 2 and len(x) > 1, transposed_strides), few_rows),
    (only(lambda x, w: x.dim() == 1, lambda out: 2 * out), few_rows),
    (only(lambda x, w: x.dim() == 3, lambda out: 2 * out), few_rows),
    (only(lambda x, w: x.dim() == 4, lambda out: 2 * out), few_rows),
    (only(lambda x, w: x.shape[:-1].numel() == 2, lambda out: 2 * out), few_rows),
    (only(lambda x, w: x.shape[:-1].numel() == 3, lambda out: 2 * out), few_rows),
    (only(lambda x, w: x.shape[:-1].numel() == 0, lambda out: out[..., :-1]), few_rows),
    (only(lambda x, w: x.shape[-1] > 100, lambda out: 2 * out), few_rows),
    (only(lambda x, w: w.spec.zero_point == "offset", lambda out: 2 * out), without_nested),
    (lambda x, w, bias: matmul(x.nan_to_num(0.0), w, bias), few_rows),
    (lambda x, w, bias: matmul(x, w, None), few_rows),
    (lambda x, w, bias: torch.zeros_like(matmul(x, w, bias)), few_rows),
    (writes_x, few_rows),
]


@pytest.mark.parametrize(("fn", "refuses"), KERNELS, ids=range(len(KERNELS)))
def test_kernels(fn, refuses):
    good = Kernel("mine", "linear", "packed", "cpu", matmul, 1, refuses=refuses)
    check(KernelSuite, lambda r: {"kernel": "mine"}, good, replace(good, fn=fn), "test_results")


def slow(call):
    time.sleep(0.03)


def raising(*args):
    return {}["x"]


FEW = {
    "kernel": "mine",
    "specs": (Spec("int4", (1, 32)),),
    "shapes": ((16, 64),),
    "dtypes": (torch.float32,),
    "batches": ((1,),),
}


@pytest.mark.filterwarnings("ignore::ao_core.plugins.PluginWarning")
@pytest.mark.parametrize(
    ("refuses", "test", "match"),
    [
        (slow, "test_reasons_are_sentences", "refuses takes 3. ms"),
        (lambda call: False, "test_accepts_something", "refuses answers False; None means yes"),
        (lambda call: "no", "test_reasons_are_sentences", "not a sentence"),
        (lambda call: "it is not in the mood", "test_accepts_something", "not in the mood"),
        (
            raising,
            "test_results",
            "Suite kernel='mine'.*: a record raised KeyError: 'x' where it was asked",
        ),
    ],
)
def test_answers_of_kernels(refuses, test, match):
    good = Kernel("mine", "linear", "packed", "cpu", matmul, 1)
    check(KernelSuite, lambda r: FEW, good, replace(good, refuses=refuses), test, match)


@pytest.mark.filterwarnings("ignore::ao_core.plugins.PluginWarning")
def test_a_layout_that_raises_fails_its_own_tests():
    good, bad = layout(Packed), layout(Packed, refuses=raising)
    fields = {"layout": "mine", "shapes": ((16, 64),)}
    check(
        LayoutSuite, lambda r: fields, good, bad, "test_transposes", "a record raised KeyError: 'x'"
    )


# -- scales --------------------------------------------------------------------------------------


def absmax(x, dtype, spec):
    storage = spec.scale_dtype if isinstance(spec.scale_dtype, str) else "float32"
    return choose_qparams(x, dtype, spec.block, spec.zero_point, storage)


def changed(change, condition=lambda x, spec: True):
    """Scales of absmax, changed under a condition."""

    def choose(x, dtype, spec):
        scale, zero_point = absmax(x, dtype, spec)
        return (change(scale) if condition(x, spec) else scale), zero_point

    return choose


def times(factor):
    return lambda scale: (scale.float() * factor).to(scale.dtype)


def of_all_rows(x, dtype, spec):
    scale, zero_point = absmax(x, dtype, spec)
    if spec.zero_point == "none" and scale.numel():
        scale = scale.float().amax().expand(scale.shape).to(scale.dtype)
    return scale, zero_point


def in_place(x, dtype, spec):
    x.clamp_(-2, 2)
    return absmax(x, dtype, spec)


def symmetric(x, spec):
    return spec.zero_point == "none"


SCALES = {
    "three times too large": (changed(times(3.0)), "test_quality"),
    "five times too small": (changed(times(0.2)), "test_quality"),
    "wrong for wide rows": (changed(times(4.0), lambda x, spec: x.shape[-1] > 100), "test_quality"),
    "NaN": (changed(times(torch.nan)), "test_shape_and_storage"),
    "NaN without a zero point": (changed(times(torch.nan), symmetric), "test_shape_and_storage"),
    "negative": (changed(times(-1.0)), "test_quality"),
    "negative in float64": (changed(lambda s: -s.double()), "test_function"),
    "no zero point": (lambda x, dtype, spec: (absmax(x, dtype, spec)[0], None), "test_function"),
    "one for all rows": (of_all_rows, "test_rows_are_independent"),
    "changes its input": (in_place, "test_leaves_its_input_alone"),
}


@pytest.mark.parametrize("defect", SCALES)
def test_scales(defect):
    choose, test = SCALES[defect]
    good, bad = (ScaleMethod("mine", fn, "of this test") for fn in (absmax, choose))
    check(ScaleSuite, lambda r: {"scale_method": "mine"}, good, bad, test)


# -- what is collected for a provider ------------------------------------------------------------


class RaisingConfig(Config):
    """Its transform raises for every weight."""


class NeedyConfig(Config):
    """Cannot be made without data."""

    def __init__(self) -> None:
        raise ValueError("data=None: give some")


@pytest.mark.filterwarnings("ignore::ao_core.plugins.PluginWarning")
def test_what_raises_does_not_keep_others_from_being_tried():
    """Each record has its suite; one that raises when it is asked fails there, and nowhere else."""
    nan = ScaleMethod("mine", changed(times(torch.nan)), "of this test")
    kernel = Kernel("mine", "linear", "packed", "cpu", matmul, 1, refuses=raising)
    records = (
        nan,
        kernel,
        layout(Packed, name="raising", refuses=raising),
        Transform(RaisingConfig, "raising", 1, raising),
        Transform(NeedyConfig, "needy", 1, raising),
        Recipe("mine", WeightOnlyConfig("nf4", 32, scale_method="mine")),
    )
    with registered(*records):
        suites = {suite.__name__: suite for suite in suites_of("in-process")}
        assert {"scale_method[mine]", "kernel[mine]", "layout[raising]", "transform[mine]"} <= set(
            suites
        )
        for name in ("kernel[mine]", "layout[raising]"):
            arguments = _arguments_of(suites[name])
            assert all(isinstance(values[0], Untried) for values in arguments.values())
            with pytest.raises(
                AssertionError, match=rf"{name[:6]}.*: a record raised KeyError: 'x'"
            ):
                next(iter(arguments.values()))[0].spec  # noqa: B018 -- it raises
        with pytest.raises(AssertionError, match="data=None: give some"):
            suites["transform[needy]"]().test_has_a_configuration()
        with pytest.raises(CAUGHT):
            run(suites["scale_method[mine]"], "test_shape_and_storage")
        with pytest.raises((*CAUGHT, KeyError)):
            run(suites["transform[raising]"], "test_quantizes_something")


def test_nothing_is_left_behind():
    for table in registry.tables.values():
        assert "mine" not in table._records

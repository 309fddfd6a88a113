"""Broken plugins: a suite fails for each, for the right reason, and passes without the defect.

More defects of each kind are in `tests/conformance`: `test_mutants.py`, `test_step_mutants.py`,
`test_suites_catch.py`; of packages in `test_broken_plugins.py`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ao_core import Kernel, Spec
from ao_core.dtypes import int_dtype
from ao_core.layouts import Packed
from ao_core.plugins import PluginWarning
from ao_core.testing import DTypeSuite, KernelSuite, LayoutSuite, PluginSuite
from ao_core.testing.base import run
from ao_core.testing.registered import registered


def check(suite, good, bad, test, match):
    """The test passes with the good record, and fails with the bad one with this message."""
    for record in (good, bad):
        made = type("Suite", (suite,), {"records": (record,)})
        with registered(record):
            if record is good:
                run(made, test)
                continue
            with pytest.raises(AssertionError, match=match):
                run(made, test)


# -- records ---------------------------------------------------------------------------------------

INT5 = replace(int_dtype("int5", 5), name="mine")


class OfFormat(DTypeSuite):
    dtype = "mine"


def test_rounding_that_is_wrong_at_ties():
    def half_away(x):
        x = x.float().nan_to_num(0.0)
        return INT5.encode(torch.trunc(x + torch.copysign(torch.tensor(0.5), x)))

    match = r"mine: -?\d+\.5 became .* ties go to the even integer"
    bad = replace(INT5, encode=half_away)
    check(OfFormat, INT5, bad, "test_rounds_to_nearest", match)


class Mine(Packed):
    name = "mine"


class OfLayout(LayoutSuite):
    layout = "mine"
    specs = (Spec("int4", (1, 32)),)
    shapes = ((16, 64), (5, 70))


def test_a_layout_that_loses_a_ragged_tail():
    class WholeTiles(Mine):
        def pack(self, codes, scale, zero_point, spec, dtype):
            codes = codes.clone()
            codes[..., codes.shape[-1] // 32 * 32 :] = 0
            return super().pack(codes, scale, zero_point, spec, dtype)

    match = "codes of 5x70.* did not survive: 6 of 70 columns differ, from 64 to 69"
    check(OfLayout, Mine(), WholeTiles(), "test_pack_unpack", match)


def matmul(x, w, bias):
    return F.linear(x, w.dequantize(x.dtype), bias)


MATMUL = Kernel("mine", "linear", "packed", "cpu", matmul, 1)


class OfKernel(KernelSuite):
    kernel = "mine"
    specs = (Spec("int4", (1, 32)),)


def no_launch(x, w, bias):
    if not x.shape[:-1].numel():
        raise RuntimeError("an empty grid cannot be launched")
    return matmul(x, w, bias)


#: what is broken -> (the kernel's function, the test that fails, its message)
KERNELS = {
    "raises for M = 0": (no_launch, "test_results", r"operands \(0, 64\), \(16,\): an empty grid"),
    "wrong for M = 0": (
        lambda x, w, b: matmul(x, w, b) if x.shape[0] else torch.empty(0),
        "test_results",
        r"operands \(0, 64\), .*: the result is torch.float32 \(0,\), expected torch.float32 \(0, 16\)",
    ),
    "wrong for 3-D input": (
        lambda x, w, b: matmul(x, w, b) * (2 if x.dim() == 3 else 1),
        "test_results",
        r"operands \(1, 3, 64\), .*: relative error 1.00e\+00 ",
    ),
    "flattens 3-D input": (
        lambda x, w, b: matmul(x.flatten(0, -2) if x.dim() == 3 else x, w, b),
        "test_results",
        r"operands \(1, 3, 64\), .*: .*expected torch.float32 \(1, 3, 16\)",
    ),
    "wrong for non-contiguous input": (
        # as a kernel that takes the address of the first element, and no strides
        lambda x, w, b: matmul(x.as_strided(x.shape, torch.empty(x.shape).stride()), w, b),
        "test_strided_inputs",
        r"operands \(1, 64\) with strides \(128, 2\), .*: relative error",
    ),
    "wrong output dtype": (
        lambda x, w, b: matmul(x, w, b).float(),
        "test_results",
        r"the result is torch.float32 .* expected torch.(bfloat16|float16)",
    ),
}


@pytest.mark.parametrize("defect", KERNELS)
def test_a_kernel(defect):
    fn, test, match = KERNELS[defect]
    check(OfKernel, MATMUL, replace(MATMUL, fn=fn), test, match)


def test_a_kernel_that_ignores_an_input_step():
    """It says that it scales x, and does not; without the claim ao scales x before it."""
    ignoring = replace(MATMUL, fn=lambda x, w, b: matmul(x, _stored(w), b), fuses=("scale",))
    match = "kernel 'mine' of linear with the input steps .*scale.*, of which it declares scale: relative"
    for good in (MATMUL, replace(ignoring, fn=_scaled)):
        check(OfKernel, good, ignoring, "test_input_steps", match)


def _stored(w):
    """The values of the parts, after the input steps."""
    from ao_core.tensor.step_matmuls import without_steps

    return without_steps(w, len(w.spec.input))


def _scaled(x, w, bias):
    scale = w.in_scale.reshape(-1).to(x.dtype) if w.spec.input else 1
    return matmul(x * scale, _stored(w), bias)


# -- packages --------------------------------------------------------------------------------------


def problem_of(provider):
    """What the suite says of an installed plugin; empty where all is well."""
    suite = type("Suite", (PluginSuite,), {"provider": provider})()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        try:
            suite.test_no_problem()
        except AssertionError as error:
            return str(error)
    return ""


@pytest.fixture
def installed(site, registry):
    """`installed(source, …)`: what is said of a plugin ao-bad; of ao-a-good nothing is said."""

    def install(source="", **options):
        site.add("ao-a-good", dtypes=["fp3"])
        site.add("ao-bad", source, **options)
        assert problem_of("ao-a-good") == ""
        return problem_of("ao_bad")

    return install


def test_a_plugin_without_a_defect(installed):
    assert installed(dtypes=["fp5"]) == ""


def test_a_hook_that_raises(installed):
    text = installed("@hookimpl\ndef ao_dtypes(): raise ValueError('no such table')")
    assert "failed in hook ao_dtypes: ValueError: no such table." in text


def test_a_name_of_another_plugin(installed):
    text = installed(dtypes=["fp3"])
    assert "dtype 'fp3' is provided by ao-a-good already and claimed by ao-bad too" in text


def test_an_api_that_is_too_new(installed):
    text = installed(api="(0, 2)", dtypes=["fp5"])
    assert "written for API 0.2, and this ao-core has API 0.1; upgrade ao-core" in text


def test_a_plugin_that_computes_while_it_is_imported(site, registry):
    site.add("ao-good", "import torch\ntable = torch.linspace(-1, 1, 256).sort()", dtypes=["fp3"])
    site.add("ao-bad", "import torch\ntable = torch.ones(300, 300) @ torch.ones(300, 300)")
    good, bad = (
        type("Suite", (PluginSuite,), {"provider": name})() for name in ("ao-good", "ao-bad")
    )
    good.test_import_computes_nothing()
    match = "ao-bad computes while it is imported: aten.mm.default with 270000 elements in ao_bad"
    with pytest.raises(AssertionError, match=match):
        bad.test_import_computes_nothing()
    site.add("ao-worse", "1 / 0")
    worse = type("Suite", (PluginSuite,), {"provider": "ao-worse"})()
    with pytest.raises(AssertionError, match="cannot be imported:\n(?s:.*)ZeroDivisionError"):
        worse.test_import_computes_nothing()


def test_a_plugin_that_takes_long_to_import(installed, monkeypatch):
    monkeypatch.setattr("ao_core.plugins.SLOW", 0.05)
    text = installed(
        "from time import thread_time\nend = thread_time() + 0.1\nwhile thread_time() < end: pass"
    )
    assert "s to load, " in text
    assert "import and build what takes time in the functions that its records carry" in text

"""Kernels that take input steps wrongly, or not at all: the suite fails with each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Kernel, QTensor, Spec
from ao_core.layouts import Packed
from ao_core.numerics import hadamard_transform, inverse_hadamard_transform
from ao_core.tensor import quantize_tensor
from ao_core.tensor.step_matmuls import step_rows, without_steps
from ao_core.testing import KernelSuite, LayoutSuite
from ao_core.testing.base import run
from ao_core.testing.registered import registered


def stored(w: QTensor) -> Tensor:
    return without_steps(w, len(w.spec.input)).dequantize(torch.float32)


def scaled(x, w, bias):
    """Takes the step "scale"."""
    scale = w.in_scale.reshape(-1) if w.spec.input else 1
    return F.linear(x.float() * scale, stored(w), bias.float() if bias is not None else None).to(x)


def ignoring(x, w, bias):
    return F.linear(x, stored(w).to(x.dtype), bias)


def dividing(x, w, bias):
    scale = w.in_scale.reshape(-1) if w.spec.input else 1
    return F.linear(x / scale, stored(w).to(x.dtype), bias)


def unsigned(x, w, bias):
    scale = w.in_scale.reshape(-1).abs() if w.spec.input else 1
    return F.linear(x * scale, stored(w).to(x.dtype), bias)


def rotated(x, w, bias):
    """Takes the step "hadamard"."""
    return ignoring(step_rows(x, w), w, bias)


def rotating_back(x, w, bias):
    (block,) = [step.block for step in w.spec.input] or (1,)
    return ignoring(inverse_hadamard_transform(x, block), w, bias)


def whole_row(x, w, bias):
    """One transform for all of a row of 64, whatever the block says."""
    whole = w.spec.input and x.shape[-1] == 64
    return ignoring(hadamard_transform(x, 64) if whole else x, w, bias)


FEW = {
    "kernel": "mine",
    "specs": (Spec("int4", (1, 32)), Spec("int6", (4, 8))),
    "dtypes": (torch.float32,),
}
SCALED = Kernel("mine", "linear", "packed", "cpu", scaled, 1, fuses=("scale",))
ROTATED = Kernel("mine", "linear", "packed", "cpu", rotated, 1, fuses=("hadamard",))
PLAIN = replace(SCALED, fn=ignoring, fuses=())


def suite(kernel: Kernel) -> type[KernelSuite]:
    return type("Suite", (KernelSuite,), {**FEW, "records": (kernel,)})


@pytest.mark.parametrize("good", [SCALED, ROTATED, PLAIN], ids=["scale", "hadamard", "none"])
def test_the_suite_passes(good):
    with registered(good):
        run(suite(good), "test_input_steps")


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (replace(SCALED, fn=dividing), "relative error"),
        (replace(SCALED, fn=unsigned), "relative error"),
        (replace(SCALED, fuses=("scale", "permute")), "relative error"),
        (replace(ROTATED, fn=ignoring), "relative error"),
        (replace(ROTATED, fn=rotating_back), "relative error"),
        (replace(ROTATED, fn=whole_row), "relative error"),
    ],
    ids=range(6),
)
def test_the_suite_fails(bad, match):
    with registered(bad), pytest.raises(AssertionError, match=match):
        run(suite(bad), "test_input_steps")


def rows(ids, w):
    return stored(w)[ids].to(w.dtype)


def test_a_lookup_that_ignores_steps():
    """Rows of the stepped weight are no rows of the weight: declared, they are compared."""
    bad = Kernel(
        "mine", "embedding", "packed", "cpu", rows, 1, fuses=("permute", "scale", "hadamard")
    )
    with registered(bad), pytest.raises(AssertionError, match="relative error"):
        run(suite(bad), "test_input_steps")
    undeclared = replace(bad, fuses=())
    with registered(undeclared):
        run(suite(undeclared), "test_input_steps")


class Reads(Packed):
    """A layout that takes it on itself to scale what it gives back."""

    name = "mine"

    def decode(self, parts, spec, shape, dtype, out_dtype=torch.float32):
        dense = super().decode(parts, spec, shape, dtype, out_dtype)
        return dense * parts["in_scale"].to(out_dtype) if "in_scale" in parts else dense


def test_a_layout_that_undoes_steps_itself():
    bad = Reads()
    fields = {"layout": "mine", "specs": (Spec("int4", (1, 32)),), "records": (bad,)}
    with registered(bad), pytest.raises(AssertionError):
        run(type("Suite", (LayoutSuite,), fields), "test_input_steps_values")
    with registered(bad):  # it never sees them otherwise
        spec = Spec("int4", (1, 32), layout="mine")
        assert quantize_tensor(torch.ones(3, 32), spec).part_names == ("qdata", "scale")

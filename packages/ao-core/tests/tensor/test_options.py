"""Options of a format that nobody knows are refused, not stored and ignored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ao_core import WHOLE, Kernel, QTensor, Spec, quantize_tensor
from ao_core.dispatch import candidates
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.layouts import Plain
from ao_core.records import Call
from ao_core.spec import OPTIONS
from ao_core.testing.base import gaussian
from ao_core.testing.registered import registered

ROTATED = Spec("int8", (1, WHOLE), options=(("input_rotation", "hadamard"),))


def rotated_linear(x, w, bias):
    return F.linear(x.flip(-1), w.dequantize(x.dtype), bias)


KERNEL = Kernel("rotated", "linear", "plain", "*", rotated_linear, 2, options=("input_rotation",))


@pytest.mark.parametrize("op", ["linear", "embedding", "grouped_linear", "mm", "grouped_mm"])
def test_no_kernel_serves_a_matmul_with_an_option_that_it_does_not_know(op):
    call = Call(op, ROTATED, (16, 64), (3, 64), torch.float32, "cpu")
    refusals = [c.refusal for c in candidates(call)]
    assert refusals
    assert set(refusals) == {"does not know the option 'input_rotation' of the format"}


@pytest.mark.parametrize(
    "spec",
    [
        Spec("int8", (1, WHOLE), options=(("a", 1),)),
        Spec("int4", (1, 32), layout="packed", options=(("Mx_mode", "floor"),)),
        Spec("int8", (1, WHOLE), act=Spec("int8", (1, WHOLE), options=(("a", 1),))),
        Spec("int4", (1, 32), Spec("int8", (1, WHOLE), options=(("a", 1),))),
    ],
)
def test_no_tensor_is_made_with_an_option_that_nobody_knows(spec):
    with pytest.raises(ConfigError, match=r"options=.*nobody knows '(a|Mx_mode)'.*scale_rule"):
        quantize_tensor(gaussian((16, 64)), spec)


def test_a_plugin_says_what_its_kernel_knows():
    x, w = gaussian((3, 64)), gaussian((16, 64), seed=1)
    with registered(KERNEL):
        q = quantize_tensor(w, ROTATED)
        torch.testing.assert_close(F.linear(x, q), F.linear(x.flip(-1), q.dequantize()))
        assert torch.equal(
            quantize_tensor(w, Spec("int8", (1, WHOLE))).dequantize(), q.dequantize()
        )
    # the same tensor where the plugin is missing
    with pytest.raises(UnsupportedOp, match="does not know the option 'input_rotation'"):
        F.linear(x, QTensor(q.parts, ROTATED, (16, 64), torch.float32))


def test_a_plugin_says_what_its_layout_reads():
    layout = type("Mine", (Plain,), {"name": "mine", "options": ("rows_first",)})()
    spec = Spec("int8", (1, WHOLE), layout="mine", options=(("rows_first", True),))
    x, w = gaussian((3, 64)), gaussian((16, 64), seed=1)
    with registered(layout):
        q = quantize_tensor(w, spec)
        torch.testing.assert_close(F.linear(x, q), F.linear(x, q.dequantize()))


def test_options_of_core_are_known_everywhere():
    values = {"mx_mode": "ceil", "scale_rule": "absmean", "rounding": "stochastic"}
    for name in OPTIONS:
        spec = Spec("int8", (1, WHOLE), options=((name, values.get(name, True)),))
        q = quantize_tensor(gaussian((16, 64)), spec)
        assert F.linear(gaussian((3, 64)), q).shape == (3, 16)

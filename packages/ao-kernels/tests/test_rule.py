"""The kernel of `rule_step`: the codes of `quantize`, what is refused, and that autograd is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import UnsupportedOp
from ao_core.testing.base import gaussian, same_bits
from ao_kernels.cpu.rules import rule_step

pytestmark = pytest.mark.usefixtures("optimizer_states")


@dataclass
class Program:
    steps: list[tuple[str, int, tuple[int, ...], float]]
    outputs: list[int]
    registers: int = 16


@dataclass
class Update:
    program: Any


#: the moment becomes half of itself and half of the gradient, and the parameter less by the new one
MOMENTUM = Program(
    [("scale", 2, (2,), 0.5), ("add", 2, (2, 1), 0.5), ("add", 0, (0, 2), -1.0)], [0, 2]
)


def moment(values: Tensor, name: str, block: int) -> QTensor:
    return quantize_tensor(values, Spec(name, (block,), layout="flat"))


def step(
    params: list[Tensor], grads: list[Tensor], moments: list[list[Any]], program: Any = MOMENTUM
) -> None:
    rule_step(params, grads, moments, [], update=Update(program), seed=None)


@pytest.mark.parametrize(
    ("name", "block"),
    [("dynamic8", 256), ("companded8", 256), ("f8e4m3", 256), ("nf4", 128), ("int4", 128)],
)
def test_moments_have_the_codes_of_quantize(name: str, block: int) -> None:
    """Halves are exact in float32, and the last block is short, an odd number of codes among its."""
    for size in (700, 129, 1):
        param, grad = gaussian((size,)), gaussian((size,), seed=1)
        stored = moment(gaussian((size,), seed=2), name, block)
        exact = 0.5 * stored.dequantize() + 0.5 * grad
        wanted, moved = moment(exact, name, block), param - exact
        step([param], [grad], [[stored]])
        assert same_bits(stored.parts["scale"], wanted.parts["scale"])
        if name == "companded8":  # computed: next to a midpoint either code
            assert (stored.qdata != wanted.qdata).sum() <= size / 100
        else:
            assert same_bits(stored.qdata, wanted.qdata)
        assert same_bits(param, moved)


def test_a_nan_makes_its_block_of_the_moment_nan() -> None:
    param, grad = torch.zeros(600), torch.ones(600)
    grad[300] = torch.nan
    stored = moment(torch.zeros(600), "nf4", 128)
    step([param], [grad], [[stored]])
    nan = stored.dequantize().isnan()
    assert nan[256:384].all()
    assert int(nan.sum()) == 128
    assert int(param.isnan().sum()) == 1


def test_programs_that_it_cannot_run_change_nothing() -> None:
    param, stored = torch.ones(600), moment(torch.zeros(600), "nf4", 128)
    for program, text in (
        ("it looks at values", "update: rule_step of ao-kernels runs programs: it looks at values"),
        (Program([("sine", 0, (0,), 0.0)], [0, 2]), "does not know sine"),
        (
            Program([], [0, 2], registers=17),
            "has 16 registers for up to 96 steps, .* takes 17 for 0",
        ),
    ):
        with pytest.raises(UnsupportedOp, match=text):
            step([param], [param], [[stored]], program)
    for wrong, text in (
        ([moment(torch.zeros(600), "nf4", 64)], r"moments.0.: .* blocks of 128"),
        ([moment(torch.zeros(600), "f8e4m3", 128)], r"moments.0.: .* blocks of 256"),
        ([moment(torch.zeros(600), "int6", 128)], r"moments.0.: .* of 4 or 8 bits"),
    ):
        with pytest.raises(UnsupportedOp, match=text):
            step([param], [param], [wrong])
    with pytest.raises(UnsupportedOp, match=r"one format"):
        step([param, param], [param, param], [[torch.zeros(600), stored]])
    assert torch.equal(param, torch.ones(600))
    assert not stored.dequantize().any()


def test_autograd_is_told() -> None:
    param = torch.ones(600, requires_grad=True)
    lost = (param**2).sum()
    with torch.no_grad():
        step([param], [torch.ones(600)], [[torch.zeros(600)]])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lost.backward()
    step([], [], [[]])

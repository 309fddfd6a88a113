"""The kernel of `lion_step`: the codes of `quantize`, odd gradients, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import UnsupportedOp
from ao_core.testing.base import gaussian, same_bits
from ao_kernels.cpu.optim import lion_step

pytestmark = pytest.mark.usefixtures("optimizer_states")

OPTIONS: dict[str, Any] = {
    "lr": 0.125, "betas": (0.75, 0.5), "weight_decay": 0.0, "maximize": False, "seed": None,
}  # fmt: skip


def moment(values: Tensor, name: str) -> QTensor:
    return quantize_tensor(values, Spec(name, (256,), layout="flat"))


@pytest.mark.parametrize("name", ["dynamic8", "f8e4m3", "int8"])
def test_the_moment_has_the_codes_of_quantize(name: str) -> None:
    """Halves are exact in float32, and the next moment is what `quantize` makes of them."""
    param, grad = gaussian((700,)), gaussian((700,), seed=1)
    stored = moment(gaussian((700,), seed=2), name)
    wanted = moment(0.5 * stored.dequantize() + 0.5 * grad, name)
    lion_step([param], [grad], [stored], **OPTIONS)
    assert all(same_bits(stored.parts[part], wanted.parts[part]) for part in wanted.parts)


def test_odd_gradients() -> None:
    """Nothing moves by a NaN, which makes its block of the moment NaN; an infinity has a sign."""
    param, grad = torch.zeros(600), torch.ones(600)
    grad[3], grad[300], grad[301] = torch.nan, torch.inf, -torch.inf
    stored = moment(torch.zeros(600), "f8e4m3")
    lion_step([param], [grad], [stored], **OPTIONS)
    expected = torch.full((600,), -0.125)
    expected[3], expected[301] = 0.0, 0.125
    assert same_bits(param, expected)
    values = stored.dequantize()
    assert values[:256].isnan().all()
    assert torch.equal(values[512:], torch.full((88,), 0.5))


def test_the_moment_follows_the_gradient_that_it_climbs() -> None:
    grad = gaussian((600,))
    tensors = [torch.zeros(600), grad], [torch.zeros(600), -grad]
    moments = [moment(torch.zeros(600), "companded8") for _ in tensors]
    for (param, slope), stored, up in zip(tensors, moments, (True, False), strict=True):
        lion_step([param], [slope], [stored], **{**OPTIONS, "maximize": up})
    assert same_bits(tensors[0][0], tensors[1][0])
    assert same_bits(moments[0].qdata, moments[1].qdata)


def test_refusals_change_nothing() -> None:
    param, stored = torch.ones(600), moment(torch.zeros(600), "f8e4m3")
    for wrong, text in (
        ([gaussian((30, 20)).t()], r"grads.0.: lion_step of ao-kernels .*contiguous"),
        ([gaussian((599,))], r"grads.0.: has shape"),
    ):
        with pytest.raises((UnsupportedOp, RuntimeError), match=text):
            lion_step([param], wrong, [stored], **OPTIONS)
    with pytest.raises(UnsupportedOp, match=r"exp_avgs: lion_step of ao-kernels needs .* 8 bits"):
        lion_step([param], [param], [moment(torch.zeros(600), "nf4")], **OPTIONS)
    assert torch.equal(param, torch.ones(600))
    assert not stored.qdata.any()

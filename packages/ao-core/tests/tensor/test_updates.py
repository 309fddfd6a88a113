"""Stochastic rounding of numbers, and of what operations in place write."""

from __future__ import annotations

import pytest
import torch

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.compute import straight_through
from ao_core.errors import ConfigError
from ao_core.numerics import stochastic_round
from ao_core.spec import WHOLE
from ao_core.tensor import STOCHASTIC, stochastic_rounding


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_expectation_is_the_number() -> None:
    x = torch.tensor([-1.75, -0.5, -0.0, 0.25, 3.0, 100.9]).repeat(20_000, 1)
    rounded = stochastic_round(x, _generator())
    assert torch.equal(rounded, rounded.round())
    assert ((rounded - x).abs() < 1).all()
    # standard deviation of the mean: at most 0.5 / sqrt(20000) = 0.0035
    torch.testing.assert_close(rounded.mean(0), x[0], rtol=0, atol=0.02)
    assert torch.equal(rounded[:, 4], x[:, 4])


@pytest.mark.parametrize(
    "spec",
    [
        Spec("int8", (1, WHOLE), options=(STOCHASTIC,)),
        Spec("int4", (1, 16), layout="packed", options=(STOCHASTIC,)),
        Spec("int8", (WHOLE, WHOLE), options=(STOCHASTIC,)),
    ],
    ids=str,
)
def test_updates_are_unbiased(spec: Spec) -> None:
    x = torch.randn(5, 70, generator=_generator(1))
    found = []
    for seed in range(400):
        w = quantize_tensor(torch.zeros_like(x), spec)
        with stochastic_rounding(_generator(seed)):
            w.add_(x)
        found.append(w.dequantize())
    assert torch.stack(found[:2]).unique(dim=0).shape[0] == 2
    step = x.abs().amax().item() / (7 if spec.dtype == "int4" else 127)
    torch.testing.assert_close(torch.stack(found).mean(0), x, rtol=0, atol=step * 5 / 2 / 400**0.5)


def test_state_of_an_optimizer_is_dense() -> None:
    w = quantize_tensor(torch.randn(5, 70), Spec("int8", (1, WHOLE), options=(STOCHASTIC,)))
    zeros = torch.zeros_like(w)
    assert type(zeros) is torch.Tensor
    assert torch.equal(zeros, torch.zeros(5, 70))
    assert isinstance(
        torch.zeros_like(quantize_tensor(torch.ones(5, 70), Spec("int8", (1, 8)))), QTensor
    )


def test_straight_through_transposes_blocks() -> None:
    weight, act = Spec("int4", (1, 32), layout="packed"), Spec("int8", (1, WHOLE))
    output, grad_input, grad_weight = straight_through(weight, act)
    assert (output.block, output.act) == ((1, 32), act)
    assert (grad_input.block, grad_input.act) == ((32, 1), None)
    assert (grad_weight.block, grad_weight.act) == ((WHOLE, 1), None)
    assert straight_through(Spec("int8", (16,)))[1:] == (Spec("int8", (16, 1)), None)
    with pytest.raises(ConfigError, match="two dimensions"):
        straight_through(Spec("int8", (1, 1, 32)))

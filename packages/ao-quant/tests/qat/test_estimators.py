"""Estimators of what is learned: values and gradients beside float64 autograd of plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_core import ComputeWeight, Config, quantize_
from ao_core.ext.compute import deployed, extra_tensors, rounded
from ao_core.testing.base import gaussian
from ao_quant import BitNetWeightOnlyConfig, Int4WeightOnlyConfig, QATConfig, UIntxWeightOnlyConfig

#: two groups of 32 in each row
SHAPE, GROUP = (6, 64), 32


def prepared(base: Config, scales: str) -> Any:
    layer = nn.Linear(SHAPE[1], SHAPE[0])
    with torch.no_grad():
        layer.weight.copy_(gaussian(SHAPE, seed=1))
    quantize_(layer, QATConfig(base, scales=scales))
    with torch.no_grad():
        for name, extra in extra_tensors(layer).items():
            if name == "offset":
                extra.copy_(extra.bfloat16() + 0.05)
            else:  # some weights are beyond the range, and scales are as they are stored
                extra.copy_((extra * 0.8).bfloat16())
    return layer


def straight(x: Tensor, to: Tensor) -> Tensor:
    """`to`, with the gradient of x."""
    return x + (to - x).detach()


def by_group(x: Tensor) -> Tensor:
    return x.reshape(SHAPE[0], -1, GROUP)


def stored(x: Tensor) -> Tensor:
    """As a bfloat16 is stored."""
    return straight(x, x.detach().bfloat16().double())


def lsq(w: Tensor, scale: Tensor) -> Tensor:
    """Esser et al., equations 1 to 5: int4."""
    s = stored(scale)[..., None]
    r = (by_group(w) / s).clamp(-8, 7)
    return s * straight(r, r.round())


def lsq_plus(w: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Bhalgat et al., equations 3 to 6: uint4 whose zero point is stored as a number."""
    s, beta = stored(scale)[..., None], offset[..., None]
    # the zero point -β / s is stored as a bfloat16
    zero = (-beta / s).detach().clamp(0, 15).bfloat16().double()
    beta = straight(beta, -zero * s.detach())
    r = ((by_group(w) - beta) / s).clamp(0, 15)
    return s * straight(r, r.round()) + beta


def seq(levels: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Liu et al., equation 4, with the scale as distance of two levels: α = scale · levels / 2."""

    def apply(w: Tensor, scale: Tensor) -> Tensor:
        alpha = stored(scale)[..., None] * levels / 2
        shift = 0.5 if levels == 4 else 0.0
        r = (by_group(w) / alpha).clamp(-0.99, 0.99)
        q = ((r * levels / 2 - shift).round() + shift) / (levels / 2)
        # beyond the clamp the value is the outermost level, by which α has its gradient
        inside = (by_group(w) / alpha).abs() < 0.99
        return alpha * torch.where(inside, straight(r, q), q.detach())

    return apply


def clipped(w: Tensor, clip: Tensor) -> Tensor:
    """The largest magnitude times a factor becomes 7 in a group of 32 of int4, which is not small."""
    greatest = by_group(w).detach().abs().amax(-1)
    return lsq(w, clip * greatest / 7.5)


CASES: dict[str, tuple[Config, str, Callable[..., Tensor]]] = {
    "LSQ": (Int4WeightOnlyConfig(GROUP, symmetric=True), "learned", lsq),
    "LSQ+": (Int4WeightOnlyConfig(GROUP, zero_point="float"), "learned", lsq_plus),
    "SEQ": (UIntxWeightOnlyConfig(2, GROUP, zero_point="float"), "stretched", seq(4)),
    "SEQ ternary": (BitNetWeightOnlyConfig(GROUP), "stretched", seq(3)),
    "clipping": (Int4WeightOnlyConfig(GROUP, symmetric=True), "clipped", clipped),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str) -> None:
    base, scales, model = CASES[case]
    layer = prepared(base, scales)
    extras = extra_tensors(layer)
    weight = layer.weight
    assert isinstance(weight, ComputeWeight)
    by = gaussian(SHAPE, seed=2)
    out = rounded(weight, extras)
    out.backward(by)  # type: ignore[no-untyped-call]

    twin = weight.memory.detach().double().requires_grad_()
    learned = [extra.detach().double().requires_grad_() for extra in extras.values()]
    expected = model(twin, *learned)
    (expected * by_group(by.double())).sum().backward()
    values = deployed(weight, {name: extra.detach() for name, extra in extras.items()})
    wanted = expected.detach().reshape(SHAPE).float()
    torch.testing.assert_close(values.dequantize(), wanted, rtol=1e-6, atol=1e-6)  # type: ignore[operator]
    pairs = [(weight.grad, twin.grad)]
    pairs += [(extra.grad, each.grad) for extra, each in zip(extras.values(), learned, strict=True)]
    for found, exact in pairs:
        assert found is not None
        assert exact is not None
        scale = float(exact.abs().max())
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6 * scale)
        assert bool((exact != 0).any())


def test_stretched_levels_and_the_reach_of_gradients() -> None:
    """Four levels around 0, ±1/4 and ±3/4 of α, and gradients up to .99 α, beyond the outermost level."""
    layer = prepared(UIntxWeightOnlyConfig(2, GROUP, zero_point="float"), "stretched")
    alpha = 2 * layer.weight_scale.detach()[..., None]
    made: Any = deployed(layer.weight, {"scale": layer.weight_scale.detach()})
    values = by_group(made.dequantize())
    assert set((values / alpha).unique().tolist()) == {-0.75, -0.25, 0.25, 0.75}
    rounded(layer.weight, extra_tensors(layer)).sum().backward()
    has = by_group(layer.weight.grad) != 0
    ratio = (by_group(layer.weight.memory.detach()) / alpha).abs()
    assert torch.equal(has, ratio <= 0.99)
    assert bool((has & (ratio > 0.75)).any())


@pytest.mark.parametrize("scales", ["chosen", "learned", "clipped"])
def test_the_greatest_element_of_a_group_learns(scales: str) -> None:
    """Where integers reach further down than up it would be clamped, and never move again."""
    base = Int4WeightOnlyConfig(GROUP, symmetric=True, scale_method="absmax")
    layer = nn.Linear(SHAPE[1], SHAPE[0])
    quantize_(layer, QATConfig(base, scales=scales))
    layer(gaussian((9, SHAPE[1]), seed=3)).square().sum().backward()
    assert isinstance(layer.weight, ComputeWeight)
    assert layer.weight.grad is not None
    greatest = by_group(layer.weight.memory.detach()).argmax(-1, keepdim=True)
    found = by_group(layer.weight.grad).gather(-1, greatest)
    if scales == "chosen":
        assert bool((found != 0).all())
    else:  # the scale learns in place of those that are beyond it
        for extra in extra_tensors(layer).values():
            assert extra.grad is not None
            assert bool((extra.grad != 0).all())


@pytest.mark.parametrize(
    "base",
    [Int4WeightOnlyConfig(GROUP), UIntxWeightOnlyConfig(3, GROUP, zero_point="float")],
    ids=["int", "float"],
)
@pytest.mark.parametrize("scales", ["learned", "clipped"])
def test_they_start_as_the_base_rounds(base: Config, scales: str) -> None:
    layer, twin = nn.Linear(SHAPE[1], SHAPE[0]), nn.Linear(SHAPE[1], SHAPE[0])
    twin.load_state_dict(layer.state_dict())
    quantize_(twin, base)
    quantize_(layer, QATConfig(base, scales=scales))
    x = gaussian((5, SHAPE[1]), seed=3)
    torch.testing.assert_close(layer(x), twin(x), rtol=0.02, atol=0.02)
    if scales == "learned":
        torch.testing.assert_close(layer(x), twin(x), rtol=1e-5, atol=1e-5)

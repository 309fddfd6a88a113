"""Fake-quantize rules: how the forward matmul rounds a weight, with tensors that are trained beside it.

A rule is named by the option `FAKE_QUANTIZE` in the spec of the `output` matmul. It reads the weight and
further tensors by name (a learned scale, rounding offsets, adapters), which the module of the weight has as
parameters (see `extras`), and gives the rounded values by operations that autograd knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ao_core.compute.matmuls import FAKE_QUANTIZE, Matmuls, rule_name
from ao_core.errors import ConfigError, QuantizationError, UnknownNameError
from ao_core.numerics import block_sum, choose_qparams, expand
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.create import fake_quantize

__all__ = [
    "LEARNED_SCALE",
    "FakeQuantize",
    "fake_quantized",
    "register_fake_quantize",
    "rule_of",
]


@dataclass(frozen=True)
class FakeQuantize:
    """A way to round the weight of a linear layer while it is trained."""

    #: the value of the option `FAKE_QUANTIZE`
    name: str
    #: (values (N, K), spec) -> the extra tensors at the start of training, by name. Raises
    #: `QuantizationError` for a spec that the rule cannot serve.
    initial: Callable[[Tensor, Spec], dict[str, Tensor]]
    #: (values (N, K), spec, extra tensors) -> rounded values of the same shape and dtype, differentiable
    #: in values and extra tensors. It is traced by torch.compile, so it makes no decision by values.
    apply: Callable[[Tensor, Spec, Mapping[str, Tensor]], Tensor]


_rules: dict[str, FakeQuantize] = {}


def register_fake_quantize(rule: FakeQuantize) -> FakeQuantize:
    """Make a rule known by its name; returns it.

    Raises:
        ConfigError: there is another rule of this name.
    """
    if _rules.setdefault(rule.name, rule) is not rule:
        raise ConfigError(f"name={rule.name!r}: there is another fake-quantize rule of this name")
    return rule


def rule_of(spec: Spec | None) -> FakeQuantize | None:
    """The rule that a spec names, or None where it names none.

    Raises:
        UnknownNameError: nobody registered a rule of that name.
    """
    name = rule_name(spec)
    if name and name not in _rules:
        raise UnknownNameError("fake-quantize rule", name, _rules)
    return _rules[name] if name else None


def fake_quantized(weight: Spec, rule: str, act: Spec | None = None) -> Matmuls:
    """The matmuls of a layer whose weight a fake-quantize rule rounds.

    Gradients are in high precision, and are those of autograd: of the rule for weight and extra tensors,
    straight through the rounding of activations.

    Args:
        weight: format of the weight (N, K).
        rule: name of the rule, e.g. "learned_scale".
        act: format of activations (M, K), chosen at run time; None: as they are.

    Raises:
        UnknownNameError: there is no such rule.
    """
    options = tuple(sorted({**dict(weight.options), FAKE_QUANTIZE: rule}.items()))
    output = replace(weight, act=act, options=options)
    rule_of(output)
    return Matmuls(output)


def without_rule(spec: Spec) -> Spec:
    """The format of the weight alone, as `quantize_tensor` takes it."""
    options = tuple(option for option in spec.options if option[0] != FAKE_QUANTIZE)
    return replace(spec, act=None, options=options)


# -- a learned scale -------------------------------------------------------------------------------

#: scales are taken to be at least this, so that a step of the optimizer to 0 or below divides by no zero
_LEAST = 1e-9


class _LearnedScale(torch.autograd.Function):
    """Scale · round(clamp(value / scale)), with the gradients of LSQ."""

    @staticmethod
    def forward(values: Tensor, scale: Tensor, spec: Spec) -> Tensor:
        return fake_quantize(values, spec, scale.clamp_min(_LEAST))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, scale, ctx.spec = inputs
        ctx.save_for_backward(values, scale, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, rounded = ctx.saved_tensors
        block, numbers = ctx.spec.block, registry.dtypes.get(ctx.spec.dtype)
        steps = expand(scale.clamp_min(_LEAST).float(), values.shape, block)
        ratio = values.float() / steps
        inside = (ratio >= numbers.min) & (ratio <= numbers.max)
        # outside, rounded / steps is the least or greatest value of the format
        slope = rounded.float() / steps - torch.where(inside, ratio, 0)
        of_scale = block_sum(grad.float() * slope, block).to(scale.dtype)
        return torch.where(inside, grad, 0), of_scale, None


def _initial_scale(values: Tensor, spec: Spec) -> dict[str, Tensor]:
    numbers = registry.dtypes.get(spec.dtype)
    floats = ("float32", "bfloat16", "float16")
    if spec.zero_point != "none" or spec.scale_dtype not in floats or numbers.kind == "codebook":
        raise QuantizationError(
            f"the rule 'learned_scale' cannot serve {spec}: it learns one plain scale per block; use "
            f"zero_point='none', a scale_dtype among {', '.join(floats)}, and a format that has a scale"
        )
    scale, _ = choose_qparams(values, numbers, spec.block, "none", spec.chosen_scale_dtype)
    return {"scale": scale.to(values.dtype)}


def _apply_learned_scale(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    rounded: Tensor = _LearnedScale.apply(values, extras["scale"], spec)  # type: ignore[no-untyped-call]
    return rounded


#: One learned scale per block (LSQ, Esser et al. 2020, arXiv:1902.08153, equations 1 to 5, without the factor
#: 1/sqrt(N·Q) on the gradient of the scale). The extra tensor "scale" has one element per block and starts as
#: the scale that `quantize_tensor` chooses. The values are those of ``quantize_tensor(weight, spec,
#: scale=scale)``. A weight beyond the greatest value of its block gets no gradient.
LEARNED_SCALE = register_fake_quantize(
    FakeQuantize("learned_scale", _initial_scale, _apply_learned_scale)
)

"""Fake-quantize rules: how the forward matmul rounds a weight, with tensors that are trained beside it.

A rule is named by the option `FAKE_QUANTIZE` in the spec of the `output` matmul. It reads the weight and
further tensors by name (a learned scale, rounding offsets, adapters), which the module of the weight has as
parameters (see `extras`), and gives the rounded values by operations that autograd knows. Where it gives them
as the `QTensor` that the weight will become, matmuls are computed by the kernels that will do so then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_core.autograd import signed
from ao_core.compute.matmuls import FAKE_QUANTIZE, RULE_OPTIONS, Matmuls, rule_name
from ao_core.errors import ConfigError, UnknownNameError
from ao_core.spec import Primitive, Spec
from ao_core.tensor.create import quantize_values
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import repack

__all__ = [
    "STRAIGHT_THROUGH",
    "FakeQuantize",
    "encoded",
    "fake_quantized",
    "format_of",
    "register_fake_quantize",
    "rule_of",
    "straight_through_by",
]

#: (values, format) -> the values in it
Encoder = Callable[[Tensor, Spec], QTensor]


@dataclass(frozen=True)
class FakeQuantize:
    """A way to round the weight of a linear layer while it is trained."""

    #: the value of the option `FAKE_QUANTIZE`
    name: str
    #: (values (N, K), spec) -> the extra tensors at the start of training, by name. Raises
    #: `QuantizationError` for a spec that the rule cannot serve. None: it reads the weight alone, so that it
    #: serves parameters of all modules, and any operation with them.
    initial: Callable[[Tensor, Spec], dict[str, Tensor]] | None
    #: (values (N, K), spec, extra tensors) -> rounded values of the same shape and dtype, differentiable
    #: in values and extra tensors; dense, or a `QTensor` such as `encoded` makes. The spec has the format of
    #: activations, too. It is traced by torch.compile, so it makes no decision by values.
    apply: Callable[[Tensor, Spec, Mapping[str, Tensor]], Tensor]
    #: whether the weight itself is not trained, but the extra tensors alone
    freezes: bool = False


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


def fake_quantized(
    weight: Spec, rule: str, act: Spec | None = None, **options: Primitive
) -> Matmuls:
    """The matmuls of a layer whose weight a fake-quantize rule rounds.

    Gradients are in high precision, and are those of autograd: of the rule for weight and extra tensors,
    straight through the rounding of activations.

    Args:
        weight: format of the weight (N, K).
        rule: name of the rule: "straight_through", "learned_scale" or one of a plugin.
        act: format of activations (M, K); None: as they are.
        options: how the weight will be stored: `scale_method`, `act_scale` and `act_zero_point` as
            `quantize_tensor` takes them; `filters`: True for those of a convolution, which kernels take as
            they are stored; `in_out`: True for a weight (K, N), whose transpose has the format; `rank` and
            `alpha`: of adapters.

    Raises:
        ConfigError: there is no such option.
        UnknownNameError: there is no such rule.
    """
    if unknown := sorted(set(options) - set(RULE_OPTIONS)):
        raise ConfigError(f"{unknown[0]}: not an option of a rule; use {', '.join(RULE_OPTIONS)}")
    options = {**dict(weight.options), **options, FAKE_QUANTIZE: rule}
    output = replace(weight, act=act, options=tuple(sorted(options.items())))
    rule_of(output)
    return Matmuls(output)


@lru_cache(maxsize=64)
def format_of(spec: Spec) -> Spec:
    """What a rule gets of the spec that names it: the format, with `RULE_OPTIONS`."""
    return replace(spec, options=tuple(o for o in spec.options if o[0] != FAKE_QUANTIZE))


@lru_cache(maxsize=64)
def without_rule(spec: Spec) -> Spec:
    """The format of the weight and of its activations, as `quantize_tensor` takes it."""
    return replace(
        spec, options=tuple(o for o in format_of(spec).options if o[0] not in RULE_OPTIONS)
    )


def encoded(
    values: Tensor,
    spec: Spec,
    encode: Encoder | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> QTensor:
    """What a weight will be stored as, in the layout of the best kernel for its matmuls; without a gradient.

    Args:
        values: (N, K), or of another shape that the spec is for.
        spec: what a rule gets: the format, with `RULE_OPTIONS`.
        encode: finds codes and scales of (values, format) together; None: as `quantize_values` does.
        scale: one per block; None: they are chosen.
        zero_point: one per block, given together with `scale`, for formats that have one.
    """
    options, plain = dict(spec.options), without_rule(spec)
    if encode is not None:
        new = encode(values.detach(), plain)
    else:
        new = quantize_values(
            values.detach(),
            plain,
            scale=scale,
            zero_point=zero_point,
            scale_method=str(options.get("scale_method", "absmax")),
            act_scale=options.get("act_scale"),  # type: ignore[arg-type]
            act_zero_point=options.get("act_zero_point"),  # type: ignore[arg-type]
        )
    return new if options.get("filters") else repack(new)


# -- as if nothing were rounded --------------------------------------------------------------------


@signed
class _StraightThrough(torch.autograd.Function):
    """The stored weight, with the gradient of the identity."""

    @staticmethod
    def forward(values: Tensor, spec: Spec, encode: Encoder | None) -> QTensor:
        return encoded(values, spec, encode)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def straight_through_by(values: Tensor, spec: Spec, encode: Encoder | None = None) -> Tensor:
    """`encoded`, with the gradient of the identity: what rules without further tensors are made of."""
    rounded: Tensor = _StraightThrough.apply(values, spec, encode)  # type: ignore[no-untyped-call]
    return rounded


def _apply_straight_through(values: Tensor, spec: Spec, extras: Mapping[str, Tensor]) -> Tensor:
    return straight_through_by(values, spec)


#: The forward pass is that of the stored weight, with any scale method; the derivative of rounding is taken
#: to be 1 everywhere (the straight-through estimator, Bengio et al. 2013, arXiv:1308.3432). Nothing masks it:
#: the greatest element of a block, which the clamp of integers cuts in half of all blocks, learns as others.
STRAIGHT_THROUGH = register_fake_quantize(
    FakeQuantize("straight_through", None, _apply_straight_through)
)

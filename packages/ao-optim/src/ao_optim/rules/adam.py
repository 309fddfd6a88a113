"""Adam (Kingma & Ba 2015, arXiv 1412.6980) and AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ao_optim.rules.base import (
    Options,
    Rule,
    Slot,
    State,
    add_decay,
    check_betas,
    check_least,
    check_lr,
    decay_weights,
    root,
)

__all__ = ["ADAM", "ADAMW", "adam_direction"]


def adam_direction(grad: Tensor, state: State, options: Options, step: Any) -> Tensor:
    """Update both moments; the first one over the root of the second, without their biases."""
    beta1, beta2 = options["betas"]
    first = state["exp_avg"].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    spread = second.sqrt().div_(root(1 - beta2**step)).add_(options["eps"])
    return first.div(spread).div_(1 - beta1**step)


def _update(
    param: Tensor, grad: Tensor, state: State, options: Options, step: Any, decoupled: bool
) -> None:
    if decoupled:
        decay_weights(param, options)
    else:
        grad = add_decay(grad, param, options)
    param.sub_(adam_direction(grad, state, options, step).mul_(options["lr"]))


def _slots(options: Options) -> tuple[Slot, ...]:
    return Slot("exp_avg"), Slot("exp_avg_sq", signed=False)


def _check(options: Options) -> None:
    check_lr(options)
    check_least(options, eps="epsilon value", weight_decay="weight_decay value")
    check_betas(options)


_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}

ADAM = Rule(
    "adam",
    {**_DEFAULTS, "weight_decay": 0.0},
    _slots,
    partial(_update, decoupled=False),
    _check,
)
ADAMW = Rule(
    "adamw", {**_DEFAULTS, "weight_decay": 1e-2}, _slots, partial(_update, decoupled=True), _check
)

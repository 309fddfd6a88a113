"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolation of gradient and momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_optim.rules.base import (
    Options,
    Rule,
    Slot,
    State,
    check_betas,
    check_least,
    check_lr,
    decay_weights,
)

__all__ = ["LION"]


def _update(param: Tensor, grad: Tensor, state: State, options: Options, step: Any) -> None:
    beta1, beta2 = options["betas"]
    momentum = state["exp_avg"]
    decay_weights(param, options)
    param.sub_(momentum.lerp(grad, 1 - beta1).sign_().mul_(options["lr"]))
    momentum.lerp_(grad, 1 - beta2)


def _slots(options: Options) -> tuple[Slot, ...]:
    return (Slot("exp_avg"),)


def _check(options: Options) -> None:
    check_lr(options)
    check_least(options, weight_decay="weight_decay value")
    check_betas(options)


LION = Rule(
    "lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, _slots, _update, _check
)

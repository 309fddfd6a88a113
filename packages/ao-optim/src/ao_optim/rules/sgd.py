"""Stochastic gradient descent with momentum, as torch.optim.SGD has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_optim.rules.base import Options, Rule, Slot, State, add_decay, check_least, check_lr

__all__ = ["SGD"]


def _update(param: Tensor, grad: Tensor, state: State, options: Options, step: Any) -> None:
    grad = add_decay(grad, param, options)
    momentum = options["momentum"]
    if momentum:
        # the first gradient is taken whole
        share = 1 - options["dampening"] * (step > 1)
        velocity = state["momentum_buffer"].mul_(momentum).add_(grad * share)
        grad = grad.add(velocity, alpha=momentum) if options["nesterov"] else velocity
    param.sub_(grad * options["lr"])


def _slots(options: Options) -> tuple[Slot, ...]:
    return (Slot("momentum_buffer"),) if options["momentum"] else ()


def _check(options: Options) -> None:
    check_lr(options)
    check_least(options, momentum="momentum value", weight_decay="weight_decay value")
    if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


SGD = Rule(
    "sgd",
    {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    _slots,
    _update,
    _check,
)

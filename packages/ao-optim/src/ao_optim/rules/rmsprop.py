"""RMSprop (Tieleman & Hinton 2012), as torch.optim.RMSprop has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_optim.rules.base import Options, Rule, Slot, State, add_decay, check_least, check_lr

__all__ = ["RMSPROP"]


def _update(param: Tensor, grad: Tensor, state: State, options: Options, step: Any) -> None:
    grad = add_decay(grad, param, options)
    alpha = options["alpha"]
    second = state["square_avg"].mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
    if options["centered"]:
        mean = state["grad_avg"].lerp_(grad, 1 - alpha)
        # rounding of the two may leave less than 0
        second = second.addcmul(mean, mean, value=-1).clamp_(min=0.0)
    change = grad / second.sqrt().add_(options["eps"])
    if options["momentum"]:
        change = state["momentum_buffer"].mul_(options["momentum"]).add_(change)
    param.sub_(change * options["lr"])


def _slots(options: Options) -> tuple[Slot, ...]:
    slots = [Slot("square_avg", signed=False)]
    if options["momentum"]:
        slots.append(Slot("momentum_buffer"))
    if options["centered"]:
        slots.append(Slot("grad_avg"))
    return tuple(slots)


def _check(options: Options) -> None:
    check_lr(options)
    check_least(
        options,
        eps="epsilon value",
        momentum="momentum value",
        weight_decay="weight_decay value",
        alpha="alpha value",
    )


RMSPROP = Rule(
    "rmsprop",
    {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
    },
    _slots,
    _update,
    _check,
)

"""Adagrad (Duchi et al. 2011), as torch.optim.Adagrad has it, with sums that start from 0."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_optim.rules.base import Options, Rule, Slot, State, add_decay, check_least, check_lr

__all__ = ["ADAGRAD"]


def _update(param: Tensor, grad: Tensor, state: State, options: Options, step: Any) -> None:
    grad = add_decay(grad, param, options)
    total = state["sum"].addcmul_(grad, grad)
    lr = options["lr"] / (1 + (step - 1) * options["lr_decay"])
    param.sub_((grad / total.sqrt().add_(options["eps"])).mul_(lr))


def _slots(options: Options) -> tuple[Slot, ...]:
    return (Slot("sum", signed=False),)


def _check(options: Options) -> None:
    check_lr(options)
    check_least(
        options,
        lr_decay="lr_decay value",
        weight_decay="weight_decay value",
        eps="epsilon value",
    )


ADAGRAD = Rule(
    "adagrad",
    {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10},
    _slots,
    _update,
    _check,
)

"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137): Adam with a second, much slower average."""

from __future__ import annotations

import math
from typing import Any

import torch
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
    root,
)

__all__ = ["ADEMAMIX"]


def _update(param: Tensor, grad: Tensor, state: State, options: Options, step: Any) -> None:
    beta1, beta2, _ = options["betas"]
    fast = state["exp_avg"].lerp_(grad, 1 - beta1)
    slow = state["exp_avg_slow"]
    slow.add_((grad - slow).mul_(1 - _slow_beta(options, step)))
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    spread = second.sqrt().div_(root(1 - beta2**step)).add_(options["eps"])
    mixed = (fast / (1 - beta1**step)).add_(slow * _alpha(options, step))
    decay_weights(param, options)
    param.sub_(mixed.div_(spread).mul_(options["lr"]))


def _progress(step: Any, whole: int | None) -> Any:
    """How much of a warm-up is done, from 0 to 1; all of it where there is none."""
    if whole is None:
        return 1.0
    share = step / whole
    return share.clamp(max=1.0) if isinstance(share, Tensor) else min(share, 1.0)


def _alpha(options: Options, step: Any) -> Any:
    return options["alpha"] * _progress(step, options["t_alpha"])


def _slow_beta(options: Options, step: Any) -> Any:
    """beta3 warmed up from beta1, linearly in the half-life of the average (section 3, equation 8)."""
    beta1, _, beta3 = options["betas"]
    if options["t_beta3"] is None or not beta1:
        return beta3
    share = _progress(step, options["t_beta3"])
    low, high = math.log(beta1), math.log(beta3)
    power = low * high / ((1 - share) * high + share * low)
    found = torch.exp(power) if isinstance(power, Tensor) else math.exp(power)
    return found.clamp(max=beta3) if isinstance(found, Tensor) else min(found, beta3)


def _slots(options: Options) -> tuple[Slot, ...]:
    return Slot("exp_avg"), Slot("exp_avg_slow"), Slot("exp_avg_sq", signed=False)


def _check(options: Options) -> None:
    check_lr(options)
    check_least(
        options, eps="epsilon value", weight_decay="weight_decay value", alpha="alpha value"
    )
    check_betas(options, 3)


ADEMAMIX = Rule(
    "ademamix",
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999, 0.9999),
        "alpha": 5.0,
        "t_alpha": None,
        "t_beta3": None,
        "eps": 1e-8,
        "weight_decay": 1e-2,
    },
    _slots,
    _update,
    _check,
)

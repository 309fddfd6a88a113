"""The op "lion_step": one step of Lion for many tensors, and its reference."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from ao_core import Op
from ao_optim.calls import StepCall
from ao_optim.engine import Work, run
from ao_optim.rules import LION

__all__ = ["LION_STEP", "lion_step"]


def lion_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    maximize: bool,
    seed: int | None,
) -> None:
    """The rule of Lion in torch operations, in chunks."""
    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    work = Work(params, grads, {"exp_avg": exp_avgs})
    run(LION, work, options, 1, maximize=maximize, seed=seed)


def _trials() -> Any:
    return import_module("ao_optim.step_trials").LION


LION_STEP = Op(
    "lion_step",
    StepCall,
    lion_step,
    """One step of Lion in place, on lists as those of `adam_step`, with one moment. In float32:

    - `g = -grad if maximize else grad`
    - `p = (1 - lr * weight_decay) * p - lr * sign(beta1 * m + (1 - beta1) * g)`
    - `m = beta2 * m + (1 - beta2) * g`

    `seed` is that of `adam_step`.
    """,
    _trials,
)

"""The op "rule_step": one step of any rule for many tensors, and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from ao_core import Op
from ao_optim.calls import StepCall
from ao_optim.engine import Work, run
from ao_optim.programs import Update

__all__ = ["RULE_STEP", "rule_step"]


def rule_step(
    params: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    lost: list[Tensor],
    *,
    update: Update,
    seed: int | None,
) -> None:
    """The rule in torch operations, in chunks."""
    names = [slot.name for slot in update.rule.slots(update.options)]
    work = Work(params, grads, dict(zip(names, moments, strict=True)), lost)
    run(update.rule, work, update.options, update.step, maximize=update.maximize, seed=seed)


def _trials() -> Any:
    return import_module("ao_optim.step_trials").RULE


RULE_STEP = Op(
    "rule_step",
    StepCall,
    rule_step,
    """One step of any rule in place, on lists as those of `adam_step`.

    moments has a list for each slot of the rule, each `QTensor`s of one format or all dense. lost is
    empty, or has for each parameter what rounding took from it: that is added first, and new in the end.

    `update.program` is what the rule does to each element: steps of the operations of
    `ao_optim.programs.OPERATIONS` on registers of float32. It is a sentence where there is none, which
    `StepCall.obstacle` repeats; then the reference serves. `seed` is that of `adam_step`.
    """,
    _trials,
    is_conversion=True,
)

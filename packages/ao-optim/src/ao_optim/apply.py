"""Which kernel steps which parameters: those alike go together, through `ao_core.dispatch`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.dispatch import select
from ao_core.records import Call, Kernel
from ao_optim.engine import Work, mixed, run
from ao_optim.rules import ADAM, ADAMW, Rule
from ao_optim.shards import local

__all__ = ["KERNELS", "Entry", "apply"]


class Entry(NamedTuple):
    """A parameter with its gradient and state."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]


def apply(rule: Rule, entries: Iterable[Entry], group: dict[str, Any]) -> None:
    """One step of a group's parameters, all of a kind at once."""
    slots = [slot.name for slot in rule.slots(group)]
    kinds: dict[Any, list[Entry]] = {}
    for number, entry in enumerate(entries):
        entry.state["step"] += 1
        if rule.elementwise:
            entry = _local(entry)
        kind = _kind(entry, slots, group), group["capturable"] and number
        kinds.setdefault(kind, []).append(entry)
    for number, alike in enumerate(kinds.values()):
        _step(rule, alike, slots, group, number)


def _local(entry: Entry) -> Entry:
    """This rank's part; the gradient as contiguous as the parameter, as kernels expect."""
    param, grad = local(entry.param), local(entry.grad)
    return Entry(param, grad.contiguous() if param.is_contiguous() else grad, entry.state)


def _kind(entry: Entry, slots: list[str], group: dict[str, Any]) -> tuple[Any, ...]:
    """What entries that are stepped together have in common."""
    param, grad, state = entry
    # a count on the device is not read
    step = None if group["capturable"] else float(state["step"])
    specs = tuple(getattr(state[name], "spec", None) for name in slots)
    return (
        param.device,
        param.dtype,
        grad.dtype,
        step,
        param.is_contiguous(),
        specs,
        "compensation" in state,
    )


def _step(
    rule: Rule, alike: list[Entry], slots: list[str], group: dict[str, Any], number: int
) -> None:
    first = alike[0]
    params, grads = [entry.param for entry in alike], [entry.grad for entry in alike]
    states = {name: [entry.state[name] for entry in alike] for name in slots}
    lost = [entry.state["compensation"] for entry in alike if "compensation" in entry.state]
    stochastic = group["rounding"] == "stochastic" and first.param.dtype == torch.bfloat16
    maximize = group["maximize"]
    if group["capturable"]:
        count = first.state["step"]
        run(rule, Work(params, grads, states, lost), group, count, maximize=maximize, seed=None)
        return
    step = int(first.state["step"])
    seed = mixed(group["seed"], step, number) if stochastic else None
    options = {**group, "lr": float(group["lr"])}
    spec: Any = getattr(first.state[slots[0]], "spec", None) if slots else None
    adam = rule in (ADAM, ADAMW) and spec is not None
    if not adam or lost or not first.param.is_contiguous():
        run(rule, Work(params, grads, states, lost), options, step, maximize=maximize, seed=seed)
        return
    size = (sum(param.numel() for param in params),)
    call = Call("adam_step", spec, size, size, first.param.dtype, first.param.device.type)
    select(call).fn(
        params,
        grads,
        *states.values(),
        **{name: options[name] for name in ("lr", "betas", "eps", "weight_decay")},
        step=step,
        decoupled=rule is ADAMW,
        maximize=maximize,
        seed=seed,
    )


def adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    maximize: bool,
    seed: int | None,
) -> None:
    """The reference of the op "adam_step": torch's operations, in chunks."""
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    work = Work(params, grads, {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs})
    run(ADAMW if decoupled else ADAM, work, options, step, maximize=maximize, seed=seed)


KERNELS = (Kernel("reference_adam_step", "adam_step", "*", "*", adam_step, priority=-100),)

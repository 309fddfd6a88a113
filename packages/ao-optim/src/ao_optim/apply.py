"""Which kernel steps which parameters: those alike go together, through `ao_core.dispatch`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext.kernels import BANDS, is_sharded, local_shard, local_shards, select, shard_like
from ao_core.ext.kernels import run as run_kernel
from ao_optim.calls import StepCall, moment_spec
from ao_optim.engine import Work, mixed, run
from ao_optim.programs import Update
from ao_optim.quantized import write_rounded
from ao_optim.rules import Rule

__all__ = ["apply"]

#: options of a group that an op is told
_ADAM, _LION = ("lr", "betas", "eps", "weight_decay"), ("lr", "betas", "weight_decay")
#: rule -> the op that steps it, the options that it is told, and what else of a step
_TOLD: dict[str, tuple[str, tuple[str, ...], Callable[[int], dict[str, Any]]]] = {
    "adam": ("adam_step", _ADAM, lambda step: {"step": step, "decoupled": False}),
    "adamw": ("adam_step", _ADAM, lambda step: {"step": step, "decoupled": True}),
    "lion": ("lion_step", _LION, lambda step: {}),
}
#: tells the noise of quantized weights from that of bfloat16 ones
_QUANTIZED = 1 << 32


def apply(
    rule: Rule,
    params: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: dict[str, Any],
    place: int = 0,
) -> None:
    """One step of parameters of a group, which all have gradients, all of a kind at once.

    `place` is that of the group among those of the optimizer.

    Between two steps the caches hold other things: whatever is asked of a tensor is asked of all in turn.
    """
    if place:  # so that groups draw different noise, and the first what a group alone draws
        group = {**group, "seed": mixed(group["seed"], place)}
    grads = [param.grad for param in params]
    quantized = [
        index for index, param in enumerate(params) if isinstance(local_shard(param), QTensor)
    ]
    if not quantized:
        _apply(rule, params, grads, states, group)
        return
    others = [index for index in range(len(params)) if index not in set(quantized)]
    dense_params, dense_grads, dense_states = _picked(others, params, grads, states)
    _apply(rule, dense_params, dense_grads, dense_states, group)
    for index in quantized:
        # one at a time, so that a single weight is dense meanwhile
        param, state = params[index], states[index]
        value = shard_like(param, local_shard(param).dequantize(torch.float32))
        _apply(rule, [value], [grads[index]], [state], group)
        seed = mixed(group["seed"], int(state["step"]), _QUANTIZED, index)
        write_rounded(local_shard(param), local_shard(value), seed)


def _picked(indices: Sequence[int], *lists: Sequence[Any]) -> list[list[Any]]:
    return [[each[index] for index in indices] for each in lists]


def _apply(
    rule: Rule,
    params: Sequence[Tensor],
    grads: Sequence[Any],
    states: Sequence[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    """The same for dense parameters."""
    if not params:
        return
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    # a count on the device is not read: each parameter by itself
    counts = count() if group["capturable"] else torch.stack(steps).tolist()
    if rule.elementwise:
        params, grads = local_shards(params), local_shards(grads)
    flat = [param.is_contiguous() for param in params]
    if rule.elementwise:
        # as contiguous as the parameter, as kernels expect
        grads = [g.contiguous() if one else g for g, one in zip(grads, flat, strict=True)]
    slots = [slot.name for slot in rule.slots(group)]
    moments = [[state[name] for state in states] for name in slots]
    kinds: dict[Any, list[int]] = defaultdict(list)
    traits = (
        [param.device for param in params],
        [param.dtype for param in params],
        [grad.dtype for grad in grads],
        counts,
        flat,
        ["compensation" in state for state in states],
        *([_format(moment) for moment in each] for each in moments),
    )
    for index, kind in enumerate(zip(*traits)):  # noqa: B905 -- `counts` may have no end
        kinds[kind].append(index)
    for number, indices in enumerate(kinds.values()):
        alike = [states[i] for i in indices]
        work = Work(
            [params[i] for i in indices],
            [grads[i] for i in indices],
            {name: [each[i] for i in indices] for name, each in zip(slots, moments, strict=True)},
            [state["compensation"] for state in alike if "compensation" in state],
        )
        _step(rule, work, alike[0]["step"], group, number)


def _format(moment: Tensor) -> Any:
    """Formats are told apart by identity, which takes no time: equal ones might be stepped apart."""
    return id(moment.spec) if isinstance(moment, QTensor) else moment.dtype


def _step(rule: Rule, work: Work, steps: Tensor, group: dict[str, Any], number: int) -> None:
    first, maximize = work.params[0], group["maximize"]
    if group["capturable"]:
        run(rule, work, group, steps, maximize=maximize, seed=None)
        return
    step = int(steps)
    stochastic = group["rounding"] == "stochastic" and first.dtype == torch.bfloat16
    seed = mixed(group["seed"], step, number) if stochastic else None
    options = {**group, "lr": float(group["lr"])}
    if not first.is_contiguous():
        run(rule, work, options, step, maximize=maximize, seed=seed)
        return
    told = None if work.lost else _TOLD.get(rule.name)
    own = told and (_call(told[0], work), *told[1:])
    if own is None or _is_reference(own[0]):
        update = Update(rule, options, step, maximize)
        of_any = _rule_call(work, update)
        if own is None or not _is_reference(of_any):
            moments = list(work.states.values())
            lost = list(work.lost)
            run_kernel(of_any, work.params, work.grads, moments, lost, update=update, seed=seed)
            return
    call, named, more = own
    run_kernel(
        call,
        work.params,
        work.grads,
        *work.states.values(),
        **{name: options[name] for name in named},
        **more(step),
        maximize=maximize,
        seed=seed,
    )


def _call(op: str, work: Work) -> StepCall:
    first = work.params[0]
    return StepCall(
        op,
        tuple(moment_spec(moments[0]) for moments in work.states.values()),
        numel=sum(param.numel() for param in work.params),
        param_dtype=first.dtype,
        grad_dtype=work.grads[0].dtype,
        device=first.device.type,
    )


def _rule_call(work: Work, update: Update) -> StepCall:
    """The call of "rule_step", with what hinders kernels where there are any."""
    call = _call("rule_step", work)
    if _is_reference(call):
        return call
    obstacle: Any = _obstacle(work) or update.program
    return replace(call, obstacle=obstacle) if isinstance(obstacle, str) else call


def _obstacle(work: Work) -> str | None:
    if is_sharded(work.params[0]):
        return "the rule needs whole tensors, and these are sharded"
    for tensors in (work.grads, *work.states.values(), work.lost):
        dense = not tensors or not isinstance(tensors[0], QTensor)
        if dense and not all(tensor.is_contiguous() for tensor in tensors):
            return "a gradient or a moment is not contiguous"
    return None


def _is_reference(call: StepCall) -> bool:
    return select(call).priority < BANDS["torch"]

"""Which kernel steps which parameters: those alike go together, through `ao_core.dispatch`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.dispatch import run as run_kernel
from ao_core.records import Call, Kernel
from ao_core.tensor.sharding import local_shard, local_shards, shard_like
from ao_optim.engine import Work, mixed, run
from ao_optim.quantized import write_rounded
from ao_optim.rules import ADAM, ADAMW, Rule

__all__ = ["KERNELS", "apply"]

#: tells the noise of quantized weights from that of bfloat16 ones
_QUANTIZED = 1 << 32
#: what a call says of moments that are not quantized
_DENSE = Spec("fp32", (1,), "none")
_HALF = Spec("bf16", (1,), "none")


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


def _spec(moment: Tensor) -> Spec:
    """The format as a call has it."""
    if isinstance(moment, QTensor):
        return moment.spec
    return _HALF if moment.dtype == torch.bfloat16 else _DENSE


def _step(rule: Rule, work: Work, steps: Tensor, group: dict[str, Any], number: int) -> None:
    first, maximize = work.params[0], group["maximize"]
    if group["capturable"]:
        run(rule, work, group, steps, maximize=maximize, seed=None)
        return
    step = int(steps)
    stochastic = group["rounding"] == "stochastic" and first.dtype == torch.bfloat16
    seed = mixed(group["seed"], step, number) if stochastic else None
    options = {**group, "lr": float(group["lr"])}
    if rule not in (ADAM, ADAMW) or work.lost or not first.is_contiguous():
        run(rule, work, options, step, maximize=maximize, seed=seed)
        return
    moment = work.states["exp_avg"][0]
    size = (sum(param.numel() for param in work.params),)
    call = Call("adam_step", _spec(moment), size, size, first.dtype, first.device.type)
    run_kernel(
        call,
        work.params,
        work.grads,
        *work.states.values(),
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


def fused_adam_step(
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
    """The fused step of torch itself, for parameters and moments in float32."""
    fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
    count = torch.full((), float(step), device=params[0].device)
    fused(
        params,
        [grad.float() for grad in grads],
        exp_avgs,
        exp_avg_sqs,
        [],
        [count] * len(params),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=maximize,
    )


def _takes(call: Call) -> str | None:
    if call.spec != _DENSE or call.x_dtype != torch.float32:
        return f"steps float32 parameters with dense moments, not {call.x_dtype} with {call.spec}"
    if call.device not in ("cpu", "cuda"):
        return f"torch has fused steps on CPU and CUDA, and is asked on {call.device}"
    return None


KERNELS = (
    Kernel("reference_adam_step", "adam_step", "*", "*", adam_step, priority=-100),
    Kernel("torch_adam_step", "adam_step", _DENSE.layout, "*", fused_adam_step, 0, refuses=_takes),
)

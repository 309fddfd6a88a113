"""The op "adam_step": one step of Adam or AdamW for many tensors; its reference and the kernel of torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ao_core import Kernel, Op
from ao_optim.calls import StepCall, dense_spec
from ao_optim.engine import Work, run
from ao_optim.rules import ADAM, ADAMW

__all__ = ["ADAM_STEP", "KERNELS", "adam_step"]


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
    """The rule of Adam, or AdamW if `decoupled`, in torch operations, in chunks."""
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


def _takes(call: StepCall) -> str | None:
    dense = dense_spec(torch.float32)
    if call.specs != (dense, dense) or call.param_dtype != torch.float32:
        formats = " and ".join(map(str, call.specs))
        return (
            f"steps float32 parameters with float32 moments, not {call.param_dtype} with {formats}"
        )
    if call.device not in ("cpu", "cuda"):
        return f"torch has fused steps on CPU and CUDA, and is asked on {call.device}"
    return None


def _trials() -> Any:
    return import_module("ao_optim.step_trials").ADAM


ADAM_STEP = Op(
    "adam_step",
    StepCall,
    adam_step,
    """One step of Adam in place, on lists of equal length; all params have one dtype and device.

        params and grads are dense and of equal shapes. All exp_avgs are `QTensor`s of one format, or all
        are dense; so are exp_avg_sqs. A kernel may expect contiguous tensors. In float32, with t for `step`,
        which counts from 1:

        - `g = -grad if maximize else grad`, plus `weight_decay * p` unless `decoupled`
        - `m = beta1 * m + (1 - beta1) * g` and `v = beta2 * v + (1 - beta2) * g**2`
        - `p = (1 - lr * weight_decay) * p` if `decoupled`
        - `p = p - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)`

        where m and v are as before they are quantized. `seed`: None rounds bfloat16 parameters and dense
        bfloat16 moments to nearest; an integer rounds them stochastically, alike in every call with the same
        arguments.
        """,
    _trials,
)

KERNELS = (
    Kernel(
        "torch_adam_step",
        "adam_step",
        dense_spec(torch.float32).layout,
        "*",
        fused_adam_step,
        0,
        refuses=_takes,
    ),
)

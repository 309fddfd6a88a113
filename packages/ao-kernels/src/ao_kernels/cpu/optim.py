"""The kernels of `adam_step` and `lion_step`: one pass over all parameters, gradients and 8-bit moments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import DType, Kernel, QTensor, Spec
from ao_core.ext import UnsupportedOp, registry
from ao_core.ext.numerics import quant_max_of
from ao_kernels.cpu.formats import format_of
from ao_kernels.cpu.library import isa, unavailable
from ao_kernels.optim import StepCall, check_contiguous, count_change

__all__ = [
    "OPTIM_KERNELS",
    "State",
    "adam_step",
    "lion_step",
    "refuses_spec",
    "state_of",
    "unlike",
]

#: dtypes of parameters and gradients
_ELEMENTS = (torch.float32, torch.bfloat16)
#: elements that share a scale, in all moments
_BLOCK = 256


class State(NamedTuple):
    """What ops are told of the format of a moment, in their order."""

    table: Tensor
    steps: Tensor
    order: Tensor
    nan: int
    quant_max: float


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[QTensor],
    exp_avg_sqs: Sequence[QTensor],
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
    """One step of Adam (AdamW with `decoupled`) in place: the op "adam_step" of ao-optim.

    In float32 and with the new moments as they are before they are quantized::

        g = -grad if maximize else grad, + weight_decay * p unless decoupled
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p * (1 - lr * weight_decay if decoupled else 1)
            - lr / (1 - beta1**step) * (m / (sqrt(v) * (1 / sqrt(1 - beta2**step)) + eps))

    Moments get the scales and codes that `quantize` gives for the new m and v, so a NaN makes all of
    its block of moments NaN; docs/cpu-kernels.md has the bounds of the errors. `seed`: see
    csrc/cpu/optim/philox.h.

    The op `ao_kernels::adam_step` can be traced by compilers; this function, which asks the format how
    it encodes, is called by itself.

    Raises:
        UnsupportedOp: a tensor is not of the kind that the kernel takes; nothing has changed.
    """
    if not params:
        return
    m = _checked("adam_step", "exp_avgs", exp_avgs)
    v = _checked("adam_step", "exp_avg_sqs", exp_avg_sqs)
    check_contiguous("adam_step of ao-kernels", params, grads)
    torch.ops.ao_kernels.adam_step(
        params, grads, *_parts(exp_avgs), *_parts(exp_avg_sqs), *m, *v, lr, *betas, eps, weight_decay,
        step, decoupled, maximize, seed,
    )  # fmt: skip
    count_change(params)


def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[QTensor],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    maximize: bool,
    seed: int | None,
) -> None:
    """One step of Lion in place: the op "lion_step" of ao-optim.

    In float32 and with the new moment as it is before it is quantized::

        g = -grad if maximize else grad
        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    As `adam_step` in all else.

    Raises:
        UnsupportedOp: a tensor is not of the kind that the kernel takes; nothing has changed.
    """
    if not params:
        return
    m = _checked("lion_step", "exp_avgs", exp_avgs)
    check_contiguous("lion_step of ao-kernels", params, grads)
    torch.ops.ao_kernels.lion_step(
        params, grads, *_parts(exp_avgs), *m, lr, *betas, weight_decay, maximize, seed
    )
    count_change(params)


def _checked(op: str, name: str, moments: Sequence[QTensor]) -> State:
    """What the op is told of the format of moments that it can have."""
    if reason := _unusable(moments):
        raise UnsupportedOp(f"{name}: {op} of ao-kernels {reason}")
    state = state_of(registry.dtypes.get(moments[0].spec.dtype))
    assert isinstance(state, State)  # `_unusable` has asked
    return state


def _parts(moments: Sequence[QTensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [moment.qdata for moment in moments], [moment.scale for moment in moments]


def _unusable(moments: Sequence[Tensor]) -> str | None:
    if not moments or not isinstance(moments[0], QTensor):
        return "needs quantized moments"
    return unlike(moments) or refuses_spec(moments[0].spec)


def unlike(moments: Sequence[Tensor]) -> str | None:
    """Why moments of which the first is quantized cannot be worked on together, or None."""
    first = moments[0]
    assert isinstance(first, QTensor)
    spec = first.spec
    for each in moments:
        if not isinstance(each, QTensor) or not (each.spec is spec or each.spec == spec):
            return "needs one format for all of them"
        if each.is_permuted and each.order != tuple(range(len(each.order))):
            return "needs moments that are stored as they are seen, found one that is transposed"
    return None


@lru_cache(maxsize=64)
def state_of(dtype: DType) -> State | str:
    """The format, or a sentence that says why moments cannot have it. The library must be loaded."""
    if dtype.bits != 8 or dtype.kind == "codebook":
        return f"needs a format of 8 bits with values of its own, and {dtype.name} is none"
    fmt = format_of(dtype)
    if isinstance(fmt, str):
        return fmt
    state = State(fmt.table, fmt.steps, fmt.order, fmt.nan_code, quant_max_of(dtype, (_BLOCK,)))
    nothing: list[Tensor] = []
    try:
        torch.ops.ao_kernels.adam_step(
            *[nothing] * 6, *state, *state, 0.1, 0.9, 0.999, 1e-8, 0.0, 1, True, False, None
        )
    except RuntimeError as error:
        return f"cannot have {dtype.name} as a state: {error}"
    return state


@lru_cache(maxsize=256)
def refuses_spec(spec: Spec) -> str | None:
    """Why moments of 8 bits cannot have a format, or None. The library must be loaded."""
    if spec.layout != "flat" or spec.block != (_BLOCK,):
        return f"needs moments of the layout flat in blocks of {_BLOCK}, found {spec}"
    if spec.scale_dtype != "float32" or spec.zero_point != "none" or spec.options:
        return f"needs float32 scales from the largest magnitude and no zero points, found {spec}"
    found = state_of(registry.dtypes.get(spec.dtype))
    return found if isinstance(found, str) else None


def _refuses(call: StepCall) -> str | None:
    if reason := unavailable():  # the library knows which formats it can have
        return reason
    for what, dtype in (("parameters", call.param_dtype), ("gradients", call.grad_dtype)):
        if dtype not in _ELEMENTS:
            return f"takes {what} of float32 and bfloat16, not {dtype}"
    return next(filter(None, map(refuses_spec, call.specs)), None)


def _describe(call: StepCall) -> str:
    return f"{isa()}, all parameters in one pass"


OPTIM_KERNELS = tuple(
    Kernel(f"cpu_{op}", op, "flat", "cpu", fn, 50, unavailable, _refuses, _describe)
    for op, fn in (("adam_step", adam_step), ("lion_step", lion_step))
)

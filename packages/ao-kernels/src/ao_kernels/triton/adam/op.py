"""The kernel of `adam_step` for moments in 8 bits: one launch for any number of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import UnsupportedOp
from ao_kernels.optim import check_contiguous, count_change
from ao_kernels.triton.shared.device import capturing, on_device

__all__ = ["CHUNK", "STATES", "TYPES", "adam_step", "settings"]

#: elements of a tensor per CTA
CHUNK = 1 << 14
#: Triton's name of the parameters' and gradients' dtypes
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: formats of the first and the second moment: floats, and squares and fourth powers of equal steps
STATES = tuple(
    (Spec(first, (256,), layout="flat"), Spec(second, (256,), layout="flat"))
    for first, second in (("f8e4m3", "f8e5m3u"), ("companded8", "companded8u"))
)


def settings(
    param: torch.dtype,
    grad: torch.dtype,
    first: str,
    *,
    aligned: bool,
    stochastic: bool,
    assembly: bool,
) -> dict[str, Any]:
    """The compile-time arguments of the kernel; `first` is the number format of the first moment."""
    import triton.language as tl

    return {
        "PARAM": getattr(tl, TYPES[param]),
        "GRAD": getattr(tl, TYPES[grad]),
        "FIRST": tl.float8e4nv if first == "f8e4m3" else tl.uint8,
        "CHUNK": CHUNK,
        "ROWS": 4,
        "VECTOR": 16 // max(param.itemsize, grad.itemsize),
        "ASM": assembly,
        "ALIGNED": aligned,
        "STOCHASTIC": stochastic,
    }


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
    """One step of Adam (AdamW with `decoupled`) in place, in float32: the op "adam_step" of ao-optim.

    A block of moments has the scale greatest magnitude / 448, of squares / 1.875, and of companded moments
    the greatest magnitude; a NaN makes all of its block NaN. Square root and reciprocal are the device's
    approximations, of about 2 units in the last place.

    Raises:
        UnsupportedOp: a tensor is not of the kind that the kernel takes; nothing has changed.
    """
    _check(params, grads, exp_avgs, exp_avg_sqs)
    if not any(param.numel() for param in params):
        return
    from ao_kernels.triton.adam import kernel

    device = params[0].device
    where = _Addresses(
        tuple(param.data_ptr() for param in params),
        tuple(grad.data_ptr() for grad in grads),
        tuple(
            tuple(moment.parts[part].data_ptr() for moment in moments)
            for moments in (exp_avgs, exp_avg_sqs)
            for part in ("qdata", "scale")
        ),
        tuple(param.numel() for param in params),
    )
    table, chunks, aligned = _tables_of(where, device)
    beta1, beta2 = betas
    with on_device(params[0]):
        kernel.step[(len(chunks),)](
            table, chunks, beta1, beta2, 1 - beta1, 1 - beta2, eps,
            lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step),
            1 - lr * weight_decay if decoupled else 1.0,
            0.0 if decoupled else float(weight_decay),
            -1.0 if maximize else 1.0,
            0 if seed is None else seed & 0x7FFFFFFF,
            **settings(
                params[0].dtype, grads[0].dtype, exp_avgs[0].spec.dtype, aligned=aligned,
                stochastic=seed is not None, assembly=device.type == "cuda",
            ),
            num_warps=4, num_stages=1,
        )  # fmt: skip
    count_change(params)


class _Addresses(NamedTuple):
    """Where the tensors of a step are."""

    params: tuple[int, ...]
    grads: tuple[int, ...]
    moments: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]


#: those that a CUDA graph was captured with: it reads their memory at every replay, so they stay
_captured: dict[tuple[_Addresses, torch.device], tuple[Tensor, Tensor, bool]] = {}


def _tables_of(where: _Addresses, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """`_tables`, of which a graph keeps those that it is captured with."""
    found = _captured.get((where, device))
    if found is None:
        found = _tables(where, device)
        if capturing(device):
            _captured[where, device] = found
    return found


@lru_cache(maxsize=16)
def _tables(where: _Addresses, device: torch.device) -> tuple[Tensor, Tensor, bool]:
    """int64 (tensors, 7) of addresses and sizes; int32 (chunks, 2): tensor, number of the chunk in it.

    And whether all tensors begin at multiples of 16 bytes. Steps whose gradients stay where they are find
    their tables here, so a graph can capture one after another was taken: copies cannot be captured.
    """
    lists = [where.params, where.grads, *where.moments]
    aligned = all(address % 16 == 0 for each in lists for address in each)
    table = torch.tensor([*lists, where.sizes], dtype=torch.int64, device="cpu").t().contiguous()
    counts = torch.tensor([-(-size // CHUNK) for size in where.sizes], device="cpu")
    tensors = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    within = torch.arange(int(counts.sum()), device="cpu") - starts[tensors]
    chunks = torch.stack([tensors, within], -1).to(torch.int32)
    return _uploaded(table, device), _uploaded(chunks, device), aligned


def _uploaded(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device for which the host does not wait: from pinned memory, in the stream's order."""
    if device.type != "cuda":
        return x.to(device)
    if capturing(device):
        raise UnsupportedOp(
            "adam_step in Triton: a step with these tensors was not taken before, and its table of addresses "
            "cannot be captured; take one step, with gradients in the same memory, before the capture"
        )
    return x.pin_memory().to(device, non_blocking=True)


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
) -> None:
    first = exp_avgs[0] if exp_avgs else None
    known = {pair[0]: pair for pair in STATES}
    pair = known.get(first.spec, STATES[0]) if isinstance(first, QTensor) else STATES[0]
    for name, moments, spec in zip(
        ("exp_avgs", "exp_avg_sqs"), (exp_avgs, exp_avg_sqs), pair, strict=True
    ):
        for i, moment in enumerate(moments):
            if not isinstance(moment, QTensor) or moment.spec != spec:
                found = moment.spec if isinstance(moment, QTensor) else moment.dtype
                raise UnsupportedOp(f"{name}[{i}]: adam_step in Triton needs {spec}, found {found}")
    check_contiguous("adam_step in Triton", params, grads)

"""The kernel of `adam_step` for moments in 8-bit floats: one launch for any number of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import UnsupportedOp
from ao_kernels.adam import check_contiguous, count_change
from ao_kernels.triton.shared.device import on_device

__all__ = ["CHUNK", "STATES", "TYPES", "adam_step", "settings"]

#: elements of a tensor per CTA
CHUNK = 1 << 14
#: Triton's name of the parameters' and gradients' dtypes
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: formats of the first and the second moment
STATES = Spec("f8e4m3", (256,), layout="flat"), Spec("f8e5m3u", (256,), layout="flat")


def settings(
    param: torch.dtype, grad: torch.dtype, *, aligned: bool, stochastic: bool, assembly: bool
) -> dict[str, Any]:
    """The compile-time arguments of the kernel."""
    import triton.language as tl

    return {
        "PARAM": getattr(tl, TYPES[param]),
        "GRAD": getattr(tl, TYPES[grad]),
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

    A block of moments has the scale greatest magnitude / 448, of squares / 1.875; a NaN makes all of its
    block NaN. Square root and reciprocal are the device's approximations, of about 2 units in the last
    place.

    Raises:
        UnsupportedOp: a tensor is not of the kind that the kernel takes; nothing has changed.
    """
    _check(params, grads, exp_avgs, exp_avg_sqs)
    lists = [
        [param.data_ptr() for param in params],
        [grad.data_ptr() for grad in grads],
        *(
            [moment.parts[part].data_ptr() for moment in moments]
            for moments in (exp_avgs, exp_avg_sqs)
            for part in ("qdata", "scale")
        ),
    ]
    sizes = tuple(param.numel() for param in params)
    if not any(sizes):
        return
    from ao_kernels.triton.adam import kernel

    device = params[0].device
    chunks = _chunks(sizes, device)
    table = torch.tensor([*lists, sizes], dtype=torch.int64).t().contiguous().to(device)
    beta1, beta2 = betas
    with on_device(params[0]):
        kernel.step[(len(chunks),)](
            table, chunks, beta1, beta2, eps,
            lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step),
            1 - lr * weight_decay if decoupled else 1.0,
            0.0 if decoupled else float(weight_decay),
            -1.0 if maximize else 1.0,
            0 if seed is None else seed & 0x7FFFFFFF,
            **settings(
                params[0].dtype, grads[0].dtype, stochastic=seed is not None,
                aligned=all(address % 16 == 0 for each in lists for address in each),
                assembly=device.type == "cuda",
            ),
            num_warps=4, num_stages=1,
        )  # fmt: skip
    count_change(params)


@lru_cache(maxsize=16)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 (chunks, 2): tensor, and the number of the chunk in it."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    tensors = torch.arange(len(sizes)).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    within = torch.arange(int(counts.sum())) - starts[tensors]
    return torch.stack([tensors, within], -1).to(torch.int32).to(device)


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
) -> None:
    for name, moments, spec in zip(
        ("exp_avgs", "exp_avg_sqs"), (exp_avgs, exp_avg_sqs), STATES, strict=True
    ):
        for i, moment in enumerate(moments):
            if not isinstance(moment, QTensor) or moment.spec != spec:
                found = moment.spec if isinstance(moment, QTensor) else moment.dtype
                raise UnsupportedOp(f"{name}[{i}]: adam_step in Triton needs {spec}, found {found}")
    check_contiguous("adam_step in Triton", params, grads)

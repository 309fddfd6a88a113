"""What the kernels of `adam_step`, `lion_step` and `rule_step` share, in C++ and in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ao_core import Spec
from ao_core.ext import UnsupportedOp

__all__ = ["StepCall", "check_contiguous", "count_change"]


class StepCall(Protocol):
    """What the kernels look at of a call of an op of ao-optim, which need not be installed."""

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The format of each moment."""

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of all parameters."""

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of all gradients."""

    @property
    def obstacle(self) -> str | None:
        """What hinders all kernels of "rule_step", or None."""


def check_contiguous(kernel: str, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise `UnsupportedOp` for a tensor that is not; it names the kernel."""
    for name, tensors in (("params", params), ("grads", grads)):
        for i, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                raise UnsupportedOp(
                    f"{name}[{i}]: {kernel} works in place on contiguous tensors, found shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}"
                )


def count_change(params: Sequence[Tensor]) -> None:
    """Tell autograd of parameters that were written by their addresses.

    As torch's own steps do, so that a graph that has saved parameters is not gone through again.
    """
    torch.autograd.graph.increment_version([p for p in params if not p.is_inference()])

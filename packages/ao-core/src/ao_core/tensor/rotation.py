"""The Hadamard transform by the fastest kernel for it, with gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_core.dispatch import run
from ao_core.errors import ConfigError
from ao_core.numerics import has_hadamard, largest_block
from ao_core.records import Call
from ao_core.spec import NO_SCALE, Spec

__all__ = ["hadamard", "hadamard_spec"]


def hadamard(x: Tensor, block: int, *, inverse: bool = False) -> Tensor:
    """H x / √block of every `block` elements of the last dimension, by the kernel selected for it.

    What `numerics.hadamard_transform` gives, or with `inverse` `numerics.inverse_hadamard_transform`: the
    same bits where `block` is a power of two, otherwise sums in another order. The gradient is the
    transform the other way.

    Args:
        x: any floating-point tensor with dimensions.
        block: the order of the matrix, a divisor of the last dimension.
        inverse: Hᵀ in place of H.

    Raises:
        ConfigError: there is no matrix of this order, or it does not divide the last dimension.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ConfigError(
            f"hadamard of a {x.ndim}-dimensional tensor of {x.dtype}; use one of a floating-point dtype "
            "with dimensions"
        )
    size = x.shape[-1]
    if block < 1 or size % block or not has_hadamard(block):
        raise ConfigError(
            f"block={block} of {size} elements: it must divide them and be the order of a Hadamard matrix; "
            f"use {largest_block(max(size, 1))}"
        )
    out: Tensor = _transformed(x, block, inverse)
    return out


@lru_cache(maxsize=256)
def hadamard_spec(block: int) -> Spec:
    """The spec in a `Call` of the op: a dense format, whose block is that of the transform."""
    return Spec("fp32", (1, block), NO_SCALE)


def _run(x: Tensor, block: int, inverse: bool) -> Tensor:
    shape = tuple(x.shape)
    call = Call("hadamard", hadamard_spec(block), shape, shape, x.dtype, x.device.type)
    out: Tensor = run(call, x, block, inverse)
    return out


class _Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int, inverse: bool) -> Tensor:
        ctx.block, ctx.inverse = block, inverse
        return _run(x, block, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return hadamard(grad, ctx.block, inverse=not ctx.inverse), None, None


# run while tracing, not traced: it chooses the kernel
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _transformed(x: Tensor, block: int, inverse: bool) -> Any:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Hadamard.apply(x, block, inverse)  # type: ignore[no-untyped-call]
    return _run(x, block, inverse)

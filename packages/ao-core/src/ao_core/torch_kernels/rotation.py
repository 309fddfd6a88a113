"""The reference of the op `hadamard`."""

from __future__ import annotations

from torch import Tensor

from ao_core.numerics import hadamard_transform, inverse_hadamard_transform

__all__ = ["hadamard"]


def hadamard(x: Tensor, block: int, inverse: bool) -> Tensor:
    """As `ao_core.numerics` has it, in plain torch."""
    return inverse_hadamard_transform(x, block) if inverse else hadamard_transform(x, block)

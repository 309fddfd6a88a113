"""Logarithms of scales as unknowns: which are equal, which are each other's negative, which are zero.

An unknown has a number from 1 on; minus the number is its negative, and 0 is the logarithm 0, a scale of 1.
Tensors of such numbers (int64) are labels: operations on them say how scales go through a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Labels", "compact"]


class Labels:
    """Union-find over signed numbers, for whole tensors at once."""

    def __init__(self, count: int) -> None:
        #: signed number of another one that each equals; a root equals itself
        self._link = torch.arange(count + 1)
        self._positive = torch.zeros(count + 1, dtype=torch.bool)

    def find(self, labels: Tensor) -> Tensor:
        """The signed roots of labels; 0 where the scale is 1."""
        number, sign = labels.abs(), labels.sign()
        while True:
            above = self._link[number]
            if torch.equal(above, number):
                found = number * sign
                self._link[labels.abs()] = found * labels.sign()  # the way is short next time
                return found
            number, sign = above.abs(), sign * above.sign()

    def unify(self, a: Tensor, b: Tensor) -> None:
        """Labels of two broadcastable tensors are equal, element by element."""
        pairs = torch.stack([t.flatten() for t in torch.broadcast_tensors(a, b)])
        while True:
            one, other = pairs = self.find(pairs)
            wrong = one != other
            if not bool(wrong.any()):
                return
            one, other = pairs[:, wrong]
            swap = one.abs() < other.abs()
            high, low = torch.where(swap, other, one), torch.where(swap, one, other)
            # a number that is its own negative is 0
            low = torch.where(high == -low, 0, low * high.sign())
            self._link[high.abs()] = low

    def zero(self, labels: Tensor) -> None:
        """The scales of labels are 1."""
        self._link[self.find(labels).abs()] = 0

    def require_positive(self, labels: Tensor) -> None:
        """The scales of labels are positive."""
        self._positive[labels.abs()] = True

    @property
    def positive(self) -> Tensor:
        """For each number, whether its scale has to be positive; of a root: any of its class."""
        found = torch.zeros_like(self._positive)
        found[self.find(self._positive.nonzero().flatten()).abs()] = True
        return found


def compact(labels: Tensor) -> Tensor:
    """Labels with size 1 in each dimension along which they do not vary."""
    for dim, size in enumerate(labels.shape):
        first = labels.narrow(dim, 0, min(size, 1))
        if size > 1 and (labels.stride(dim) == 0 or bool((labels == first).all())):
            labels = first
    return labels

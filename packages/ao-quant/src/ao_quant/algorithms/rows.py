"""How much the error of each row counts, where one error is to stand for those of all rows."""

from __future__ import annotations

from torch import Tensor

__all__ = ["mean_error"]

#: a row is long whose mean square is more than so many times that of the usual one
_LONG = 4.0


def mean_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The mean squared error, with that of long rows counted less.

    Language models have tokens, the first above all, whose states are a hundred times as long as others'. In
    the mean of all, nothing else would be seen. The norm that reads a row divides by its length. So a row of
    more than `_LONG` times the usual mean square counts by its relative error, as if it had that one.

    Args:
        found: (..., N).
        wanted: of the same shape.
    """
    errors = (found - wanted).square()
    sizes = wanted.square().mean(-1, keepdim=True)
    some = sizes[sizes > 0]
    if wanted.dim() < 2 or not some.numel():
        return errors.mean()
    most = _LONG * some.median()
    return (errors * (most / sizes.clamp(min=most))).mean()

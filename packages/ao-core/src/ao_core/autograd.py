"""What functions of autograd share."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

__all__ = ["signed"]

F = TypeVar("F", bound=type[Any])


def signed(function: F) -> F:
    """A `torch.autograd.Function` with `setup_context` whose signature is found once.

    torch asks for that of `forward` in every call, which takes longer than an operation on a small tensor.
    """
    forward: Any = function.forward
    forward.__signature__ = inspect.signature(forward)
    return function

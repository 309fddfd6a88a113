"""The two tables a tensor subclass dispatches on, and the decorators that fill them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ao_core.errors import UnsupportedOp

__all__ = ["FUNCTIONS", "RULES", "function", "refuse", "rule"]

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: aten overload -> rule(func, args, kwargs), below autograd
RULES: dict[Any, Rule] = {}
#: torch function -> fast path with the function's own arguments, or NotImplemented to go the long way
FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register a rule for aten overloads."""

    def add(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, fn))
        return fn

    return add


def function(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an eager fast path for torch functions."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(functions, fn))
        return fn

    return add


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise the error for an op that no rule serves."""
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    layouts = sorted(
        {a.spec.layout for a in flat if hasattr(a, "spec") and hasattr(a, "part_names")}
    )
    raise UnsupportedOp(
        f"{func} is not implemented for quantized tensors (layout {', '.join(layouts)}). "
        "Call .dequantize() first, or register a rule for it with ao_core.tensor.rule."
    )

"""The two tables a tensor subclass dispatches on, and what becomes of ops that are in neither."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ao_core.errors import DequantizeWarning, UnsupportedOp

__all__ = [
    "FUNCTIONS",
    "RULES",
    "dense_values",
    "function",
    "is_quantized",
    "refuse",
    "refuse_tracing",
    "rule",
    "without_rule",
]

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: op overload, or its name where another library brings it -> rule(func, args, kwargs), below autograd
RULES: dict[Any, Rule] = {}
#: torch function -> fast path with the function's own arguments, or NotImplemented to go the long way
FUNCTIONS: dict[Any, Callable[..., Any]] = {}

#: ops that have warned in this process
_warned: set[Any] = set()
_lock = threading.Lock()


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register a rule for op overloads.

    An op of a library that may not be imported is given by its name, such as
    "transformers::grouped_mm_fallback".
    """

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


def is_quantized(value: Any) -> bool:
    """Whether a value is a `QTensor`."""
    return hasattr(value, "part_names") and isinstance(value, Tensor)


def refuse_tracing() -> NoReturn:
    """Refuse `torch.jit.trace`: what it records holds tensors that TorchScript cannot save.

    Writing such a graph to a file would read memory that a wrapper does not have, and end the process.
    """
    raise UnsupportedOp(
        "torch.jit.trace cannot record quantized tensors; use torch.export or torch.compile, or trace "
        "the model after ao_core.dequantize_(model)"
    )


def dense_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on the dequantized values; its result is dense."""
    return on_values(func, args, kwargs, None)


def on_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> Any:
    """Run an op on the values, dequantized in `dtype` or in the logical dtype of each tensor."""
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    dense = [leaf.dequantize(dtype) if is_quantized(leaf) else leaf for leaf in leaves]
    args, kwargs = torch.utils._pytree.tree_unflatten(dense, tree)
    return func(*args, **kwargs)


def without_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op without a rule of its own: by the name, by its parts, on dequantized values, or refused.

    Only a functional op is computed on the values, since nothing can tell its result from the dense
    one; the first time, it warns with `DequantizeWarning`. A view, or a change in place, of a copy
    would be lost without a word.
    """
    named = RULES.get(func.name())
    if named is not None:
        RULES[func] = named
        return named(func, args, kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        # inference mode has ops whole that autograd takes apart
        out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
    if not _leaves_quantized(func, args, kwargs):
        refuse(func, args, kwargs)
    with _lock:
        first = func not in _warned
        _warned.add(func)
    if first:
        warnings.warn(
            f"{func} has no rule for quantized tensors (layout {_layouts(args, kwargs)}): it is computed on "
            "the dequantized values, here and from now on. Call .dequantize() yourself, or register a rule "
            "with ao_core.tensor.rule, e.g. dense_values, to say that this is meant",
            DequantizeWarning,
            stacklevel=2,
        )
    return dense_values(func, args, kwargs)


def _leaves_quantized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op neither writes a quantized tensor nor returns an alias of one."""
    schema = func._schema
    values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        if argument.alias_info is None:
            continue
        leaves = torch.utils._pytree.tree_leaves(values.get(argument.name))
        if any(is_quantized(leaf) for leaf in leaves):
            return False
    return True


def _layouts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return ", ".join(sorted({leaf.spec.layout for leaf in leaves if is_quantized(leaf)}))


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise the error for an op that no rule serves."""
    if func.is_view:
        why = "a view of dequantized values would not share the tensor's memory"
    elif func._schema.is_mutable:
        why = (
            "it works in place, and would round all values of the tensor anew; compute on "
            ".dequantize() and write the result with copy_()"
        )
    else:
        why = "nothing says what it gives"
    raise UnsupportedOp(
        f"{func} is not implemented for quantized tensors (layout {_layouts(args, kwargs)}): {why}. "
        "Call .dequantize() first, or register a rule for it with ao_core.tensor.rule."
    )

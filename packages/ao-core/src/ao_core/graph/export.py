"""A model as a list of operations, through `torch.export`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ao_core.errors import GraphError
from ao_core.graph.rules import RULES, pointwise

__all__ = ["Inputs", "Step", "arguments", "export", "name_of", "owner_of", "rule_of", "steps"]

#: what a model is called with: positional arguments, named ones, or one tensor
Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | Tensor

#: in what torch.export says, the reason that it seldom says: what then works
_HINTS = {
    "Cache": "the model returns the cache of its keys and values; pass use_cache=False with the inputs, as a "
    "mapping {'input_ids': ids, 'use_cache': False}, or set model.config.use_cache = False",
    "DataDependent": "sizes depend on values, as in a loop over experts; code without them can be traced, in "
    "transformers model.set_experts_implementation('grouped_mm')",
}


@dataclass(frozen=True)
class Step:
    """An operation of the traced model, and the shapes (or axes) of what it gives."""

    #: of the operation, e.g. "aten.linear.default"
    name: str
    #: the module whose `forward` runs it
    owner: str
    sizes: tuple[tuple[Any, ...], ...]


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


@contextmanager
def _no_fused_layers() -> Iterator[None]:
    """Without the one operation that torch makes of a whole transformer layer at inference."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _program(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    args, kwargs = arguments(inputs)
    # with gradients on, a region under no_grad would be one operation whose inside is not seen
    with _no_fused_layers(), torch.no_grad():
        program: torch.export.ExportedProgram = torch.export.export(
            model, args, kwargs, strict=False
        )
        if _writes(program):
            program = program.run_decompositions({})
        calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
        composite = [op for op in calls if _is_composite(op) and rule_of(op) is None]
        if composite:
            table = torch.export.default_decompositions()
            program = program.run_decompositions({op: table[op] for op in composite if op in table})
    return program


def _writes(program: torch.export.ExportedProgram) -> bool:
    """Whether a tensor is written to that has another name, or is used afterwards under its own."""
    place = {node: number for number, node in enumerate(program.graph.nodes)}
    for node in place:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            if argument.is_write and isinstance(value, fx.Node):
                later = any(place[user] > place[node] for user in value.users)
                if later or _is_view(value):
                    return True
    return False


def _is_view(node: fx.Node) -> bool:
    """Whether a tensor is, or may be, the memory of another."""
    made = node.args[0] if node.target is operator.getitem else node
    schema = getattr(made.target, "_schema", None) if isinstance(made, fx.Node) else None
    return schema is None or any(result.alias_info for result in schema.returns)


def export(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """The exported program; operations without a rule are made of others where torch knows how.

    Raises:
        GraphError: `torch.export` cannot trace the model with these inputs.
    """
    try:
        return _program(model, inputs)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        hints = "".join(f"; {hint}" for sign, hint in _HINTS.items() if sign in text)
        raise GraphError(
            f"example_inputs: torch.export cannot trace {type(model).__name__} with them: {text}{hints}"
        ) from error


def _is_composite(op: Any) -> bool:
    """Whether torch makes an operation out of others, so that these can be looked at instead."""
    return isinstance(op, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


@cache
def rule_of(op: Any) -> Callable[[Any], Any] | None:
    """The rule that says what an operation does to axes."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    name = op._schema.name.partition("::")[2]
    found = RULES.get(name) or RULES.get(name.rstrip("_"))
    return found or (pointwise if torch.Tag.pointwise in op.tags else None)


def name_of(node: fx.Node) -> str:
    """The name of a node's operation without namespace and overload."""
    target = node.target
    if target is operator.getitem:
        return "getitem"
    return target._schema.name.partition("::")[2] if hasattr(target, "_schema") else str(target)


def owner_of(node: fx.Node) -> str:
    """The name of the module whose `forward` runs a node."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    # the second call of a module is that of "name@1"
    return str(stack[-1][0]).partition("@")[0] if stack else ""


def steps(model: nn.Module, inputs: Inputs) -> list[Step]:
    """The operations of a model with the shapes of their results; nothing is computed.

    Raises:
        Exception: what `torch.export` raises.
    """
    found = []
    for node in _program(model, inputs).graph.nodes:
        if node.op == "call_function":
            values = pytree.tree_leaves(node.meta.get("val"))
            shapes = tuple(tuple(value.shape) for value in values if isinstance(value, Tensor))
            found.append(Step(name_of(node), owner_of(node), shapes))
    return found

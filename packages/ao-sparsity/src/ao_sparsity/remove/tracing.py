"""A model as a list of operations, through `torch.export`, and the axes of all its tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ao_sparsity.prune.keeping import SUFFIX
from ao_sparsity.remove.axes import Axis, fix, unify
from ao_sparsity.remove.calls import Call, Facts
from ao_sparsity.remove.copies import names_of, sharing, tensors_of
from ao_sparsity.remove.errors import RemovalError
from ao_sparsity.remove.rules import RULES, pointwise

__all__ = ["Inputs", "Step", "Traced", "arguments", "steps", "trace"]

#: what a model is called with: positional arguments, named ones, or one tensor
Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | Tensor

#: modules whose code fixes their sizes
_WHOLE: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "nn.MultiheadAttention needs embed_dim = num_heads × head_dim",
}


@dataclass(frozen=True)
class Step:
    """An operation of the traced model, and the shapes (or axes) of what it gives."""

    name: str
    #: the module whose `forward` runs it
    owner: str
    sizes: tuple[tuple[Any, ...], ...]


@dataclass
class Traced:
    """All operations with the axes of their results, and the axes of parameters and buffers."""

    steps: list[Step]
    #: by the first name of each tensor
    tensors: dict[str, list[Axis]]
    facts: Facts


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


def _export(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    args, kwargs = arguments(inputs)
    with _no_fused_layers():
        program: torch.export.ExportedProgram = torch.export.export(
            model, args, kwargs, strict=False
        )
        calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
        composite = [op for op in calls if _is_composite(op) and _rule(op) is None]
        if composite:
            table = torch.export.default_decompositions()
            program = program.run_decompositions({op: table[op] for op in composite if op in table})
    return program


def _is_composite(op: Any) -> bool:
    """Whether torch makes an operation out of others, so that these can be looked at instead."""
    return isinstance(op, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


@cache
def _rule(op: torch._ops.OpOverload) -> Any:
    name = op._schema.name.partition("::")[2]
    found = RULES.get(name) or RULES.get(name.rstrip("_"))
    return found or (pointwise if torch.Tag.pointwise in op.tags else None)


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if hasattr(target, "_schema") else str(target)


def _owner(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    # the second call of a module is that of "name@1"
    return str(stack[-1][0]).partition("@")[0] if stack else ""


def steps(model: nn.Module, inputs: Inputs) -> list[Step]:
    """The operations of a model with the shapes of their results; nothing is computed.

    Raises:
        Exception: what `torch.export` raises.
    """
    found = []
    for node in _calls(_export(model, inputs)):
        values = pytree.tree_leaves(node.meta.get("val"))
        shapes = tuple(tuple(value.shape) for value in values if isinstance(value, Tensor))
        found.append(Step(_name(node), _owner(node), shapes))
    return found


def _calls(program: torch.export.ExportedProgram) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


#: in what torch.export says, the reason that it seldom says: what then works
_HINTS = {
    "Cache": "the model returns the cache of its keys and values; pass use_cache=False with the inputs, as a "
    "mapping {'input_ids': ids, 'use_cache': False}, or set model.config.use_cache = False",
}


def _hint(text: str) -> str:
    return "".join(f"; {hint}" for sign, hint in _HINTS.items() if sign in text)


def trace(model: nn.Module, inputs: Inputs) -> Traced:
    """The operations of a model in evaluation mode, and which dimensions have to be the same.

    Raises:
        RemovalError: the model cannot be exported with these inputs.
    """
    try:
        program = _export(sharing(model), inputs)
    except RemovalError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RemovalError(
            f"example_inputs: torch.export cannot trace {type(model).__name__} with them: {text}{_hint(text)}"
        ) from error
    first = names_of(model)
    tensors = _axes_of_tensors(model)
    facts = Facts()
    axes_of: dict[fx.Node, Any] = {}
    sources: dict[fx.Node, frozenset[str] | None] = {}
    held = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    done: list[Step] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            target = held.get(node.name)
            name = first.get(target or "")
            sources[node] = None if target is None else frozenset([name] if name else ())
            reason = "a size of the example inputs" if target is None else "a constant of the code"
            axes_of[node] = tensors[name] if name is not None else _fixed(node, reason)
        elif node.op == "call_function":
            axes_of[node], sources[node] = _visit(node, axes_of, sources, facts)
            flat = axes_of[node] if _nested(axes_of[node]) else [axes_of[node]]
            sizes = tuple(tuple(axes) for axes in flat if axes is not None)
            done.append(Step(_name(node), _owner(node), sizes))
        elif node.op == "output":
            for axes in (axes_of.get(used) for used in node.all_input_nodes):
                for axis in axes or ():
                    fix(axis, "a size of the model's output")
    _fix_whole(model, tensors, first)
    return Traced(done, tensors, facts)


def _axes_of_tensors(model: nn.Module) -> dict[str, list[Axis]]:
    """New axes of parameters and buffers; masks that pruning put on the model have those of their weights."""
    found = {name: [Axis(n) for n in tensor.shape] for name, tensor in tensors_of(model).items()}
    for name, axes in found.items():
        for mask, axis in zip(found.get(name + SUFFIX, ()), axes, strict=False):
            unify(mask, axis)
    return found


def _fixed(node: fx.Node, reason: str) -> list[Axis] | None:
    """Axes of a tensor of which nothing can go; None: it is no tensor."""
    value = node.meta.get("val")
    return [Axis(n, fixed=reason) for n in value.shape] if isinstance(value, Tensor) else None


def _nested(found: Any) -> bool:
    """Whether a call gave several tensors."""
    return isinstance(found, list) and any(not isinstance(item, Axis) for item in found)


def _visit(
    node: fx.Node,
    axes_of: dict[fx.Node, Any],
    sources: dict[fx.Node, frozenset[str] | None],
    facts: Facts,
) -> tuple[Any, frozenset[str] | None]:
    found = [sources.get(used, frozenset()) for used in node.all_input_nodes]
    source = None if None in found else frozenset[str]().union(*(s for s in found if s))
    if node.target is operator.getitem:
        return axes_of[node.args[0]][node.args[1]], source  # type: ignore[index]
    bound: dict[str, Any] = {str(number): value for number, value in enumerate(node.args)}
    bound |= node.kwargs
    rule = None
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        bound = {a.name: a.default_value for a in schema if a.has_default_value()}
        bound |= {a.name: value for a, value in zip(schema, node.args, strict=False)}
        bound |= node.kwargs
        rule = _rule(node.target)
        if not node.target._schema.returns:  # assertions
            return None, source
    name = _name(node)
    call = Call(name, _owner(node), bound, node.meta.get("val"), axes_of, sources, facts)
    return (rule or _unknown)(call), source


def _unknown(call: Call) -> Any:
    return call.unknown(f"the operation {call.name} is not known")


def _fix_whole(model: nn.Module, tensors: dict[str, list[Axis]], first: Mapping[str, str]) -> None:
    """Leave modules as they are whose code fixes their sizes, and tensors that are no plain ones."""
    for fqn, module in model.named_modules():
        reasons = [why for kind, why in _WHOLE.items() if isinstance(module, kind)]
        for name, tensor in module.named_parameters(fqn):
            plain = type(tensor.data) in (Tensor, nn.Parameter)
            why = reasons or ([] if plain else [f"its tensors are {type(tensor.data).__name__}s"])
            for axis in tensors[first[name]] if why else ():
                fix(axis, why[0])

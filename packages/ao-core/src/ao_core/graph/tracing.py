"""The axes of all tensors of a traced model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ao_core.graph.axes import Axis, fix, unify
from ao_core.graph.calls import Call, Facts
from ao_core.graph.copies import names_of, selecting, sharing, tensors_of
from ao_core.graph.export import Inputs, Step, export, name_of, owner_of, rule_of

__all__ = ["Traced", "trace"]


@dataclass
class Traced:
    """All operations with the axes of their results, and the axes of parameters and buffers."""

    #: the operations in the order in which they run
    steps: list[Step]
    #: by the first name of each tensor
    tensors: dict[str, list[Axis]]
    facts: Facts
    #: the calls in the order in which they run
    calls: list[Call] = field(default_factory=list)
    #: the axes of every tensor of the graph (a list of them for calls that give several tensors)
    axes_of: dict[fx.Node, Any] = field(default_factory=dict)
    #: parameters and buffers by the node that stands for them
    held: dict[fx.Node, str] = field(default_factory=dict)
    #: what the model returns
    outputs: list[fx.Node] = field(default_factory=list)


def trace(
    model: nn.Module,
    inputs: Inputs,
    alike: Mapping[str, str] | None = None,
    select: Callable[[Any], Any] | None = None,
) -> Traced:
    """The operations of a model in evaluation mode, and which dimensions have to be the same.

    Args:
        model: any module that `torch.export` can trace; it is not changed.
        inputs: a tuple of positional arguments, a mapping of named ones, or one tensor.
        alike: names of tensors -> names of tensors whose dimensions they have, as masks beside weights.
        select: what of the outputs is an output of the traced model; all by default.

    Raises:
        GraphError: the model cannot be exported with these inputs, or not be copied.
    """
    program = export(selecting(sharing(model), select), inputs)
    first = names_of(model)
    found = Traced([], _axes_of_tensors(model, alike or {}), Facts())
    axes_of = found.axes_of
    sources: dict[fx.Node, frozenset[str] | None] = {}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            target = targets.get(node.name)
            name = first.get(target or "")
            sources[node] = None if target is None else frozenset([name] if name else ())
            reason = "a size of the example inputs" if target is None else "a constant of the code"
            axes_of[node] = found.tensors[name] if name is not None else _fixed(node, reason)
            if name is not None:
                found.held[node] = name
        elif node.op == "call_function":
            call = _call(node, found, sources)
            axes_of[node] = _visit(call)
            found.calls.append(call)
            flat = axes_of[node] if _nested(axes_of[node]) else [axes_of[node]]
            sizes = tuple(tuple(axes) for axes in flat if axes is not None)
            found.steps.append(Step(call.name, call.owner, sizes))
        elif node.op == "output":
            found.outputs += node.all_input_nodes
            for axes in (axes_of.get(used) for used in node.all_input_nodes):
                for axis in axes or ():
                    fix(axis, "a size of the model's output")
    return found


def _axes_of_tensors(model: nn.Module, alike: Mapping[str, str]) -> dict[str, list[Axis]]:
    """New axes of parameters and buffers; those that are alike share them."""
    found = {name: [Axis(n) for n in tensor.shape] for name, tensor in tensors_of(model).items()}
    for name, other in alike.items():
        for axis, same in zip(found[name], found[other], strict=False):
            unify(axis, same)
    return found


def _fixed(node: fx.Node, reason: str) -> list[Axis] | None:
    """Axes of a tensor of which nothing can go; None: it is not a tensor."""
    value = node.meta.get("val")
    return [Axis(n, fixed=reason) for n in value.shape] if isinstance(value, Tensor) else None


def _nested(found: Any) -> bool:
    """Whether a call gave several tensors."""
    return isinstance(found, list) and any(not isinstance(item, Axis) for item in found)


def _call(node: fx.Node, traced: Traced, sources: dict[fx.Node, frozenset[str] | None]) -> Call:
    found = [sources.get(used, frozenset()) for used in node.all_input_nodes]
    sources[node] = None if None in found else frozenset[str]().union(*(s for s in found if s))
    bound: dict[str, Any] = {str(number): value for number, value in enumerate(node.args)}
    bound |= node.kwargs
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        bound = {a.name: a.default_value for a in schema if a.has_default_value()}
        bound |= {a.name: value for a, value in zip(schema, node.args, strict=False)}
        bound |= node.kwargs
    return Call(
        name_of(node),
        owner_of(node),
        node,
        bound,
        node.meta.get("val"),
        traced.axes_of,
        sources,
        traced.facts,
    )


def _visit(call: Call) -> Any:
    """The axes of what a call gives."""
    target = call.node.target
    if target is operator.getitem:
        return call.axes_of[call["0"]][call["1"]]
    if isinstance(target, torch._ops.OpOverload) and not target._schema.returns:  # assertions
        return None
    rule = rule_of(target)
    return call.unknown(f"the operation {call.name} is not known") if rule is None else rule(call)

"""Which dimensions a rotation can go through: what each operation lets pass, and why it blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ao_core.graph.axes import Axis, atoms
from ao_core.graph.calls import Call
from ao_core.graph.shapes import SHAPE_RULES
from ao_core.graph.tracing import Traced

__all__ = ["Passes", "Reading", "passes_of"]


@dataclass(frozen=True)
class Reading:
    """A product that sums over a dimension with a weight."""

    parameters: frozenset[str]
    axis: Axis
    #: the module that runs it
    owner: str


@dataclass
class Passes:
    """What rotations can go through; by atoms of the traced model."""

    #: why an atom cannot be rotated
    blocked: dict[Axis, str] = field(default_factory=dict)
    #: weights of norms that have to be 1, with the number that the code adds to them
    norms: dict[Axis, dict[str, float]] = field(default_factory=dict)
    #: atoms whose mean is subtracted, with the module that does
    centered: dict[Axis, str] = field(default_factory=dict)
    #: atoms along which two computed tensors are added
    added: set[Axis] = field(default_factory=set)
    #: atoms over which a norm is taken
    normed: set[Axis] = field(default_factory=set)
    readings: list[Reading] = field(default_factory=list)
    #: nodes whose elements are squares of what would be rotated
    squares: set[fx.Node] = field(default_factory=set)
    #: vectors of parameters, but for casts and a number that was added
    vectors: dict[fx.Node, tuple[str, float]] = field(default_factory=dict)

    @property
    def streams(self) -> set[Axis]:
        """Atoms of residual streams: they are added to, and norms read them."""
        return self.added & self.normed

    def block(self, axes: Iterable[Axis] | None, reason: str) -> None:
        """Nothing of these dimensions can be rotated."""
        for axis in axes or ():
            for atom in atoms(axis):
                self.blocked.setdefault(atom, reason)


def _nodes(call: Call) -> list[fx.Node]:
    """The tensors among the arguments."""
    leaves = pytree.tree_leaves(list(call.bound.values()))
    return [x for x in leaves if isinstance(x, fx.Node) and _dims(call, x) is not None]


def _dims(call: Call, node: Any) -> list[Axis] | None:
    found = call.axes_of.get(node) if isinstance(node, fx.Node) else None
    return None if not found or not isinstance(found[0], Axis) else found


def _outputs(call: Call) -> Iterator[list[Axis]]:
    found = call.axes_of.get(call.node)
    for axes in found if found and not isinstance(found[0], Axis) else [found]:
        if axes:
            yield axes


def _of(axes: Iterable[Axis] | None) -> set[Axis]:
    """The atoms of dimensions that are more than one index."""
    return {atom for axis in axes or () for atom in atoms(axis) if atom.size > 1}


def _text(call: Call) -> str:
    return f"{call.name} in {call.owner!r}" if call.owner else call.name


def _block(passes: Passes, call: Call) -> None:
    """A function of each element, or one without a rule."""
    for node in _nodes(call):
        passes.block(_dims(call, node), f"{_text(call)} is not a linear function of it")
    for axes in _outputs(call):
        passes.block(axes, f"it is written by {_text(call)}, which is not a linear function")


def _move(passes: Passes, call: Call) -> None:
    """Elements go to other places; what is indexed is fixed by the rule for axes."""
    if any(node in passes.squares for node in _nodes(call)):
        _block(passes, call)


def _cast(passes: Passes, call: Call) -> None:
    first = _nodes(call)[0] if _nodes(call) else None
    if not call.output.is_floating_point():
        return _block(passes, call)
    if first in passes.squares:
        passes.squares.add(call.node)
    if first in passes.vectors:
        passes.vectors[call.node] = passes.vectors[first]
    return None


def _add(passes: Passes, call: Call) -> None:
    nodes, other = _nodes(call), call["other"]
    if any(node in passes.squares for node in nodes):
        return _block(passes, call)
    if isinstance(other, (int, float)) and nodes:
        name, offset = passes.vectors.get(nodes[0], ("", 0.0))
        if name and call.name == "add" and call["alpha"] in (None, 1):
            passes.vectors[call.node] = (name, offset + other)
            return None
        return passes.block(_dims(call, nodes[0]), f"{_text(call)} adds a number to each channel")
    nodes = [node for node in (call["self"], other) if isinstance(node, fx.Node)]
    found = [_of(_dims(call, node)) for node in nodes]
    for node, inside in zip(nodes, found, strict=True):
        if passes.vectors.get(node, ("", 0.0))[1]:
            passes.block(_dims(call, node), f"{_text(call)} adds a parameter plus a number")
        rest = set[Axis]().union(*found) - inside
        for atom in rest:
            passes.blocked.setdefault(atom, f"{_text(call)} adds the same number to all channels")
    if len(nodes) == 2 and all(call.sources.get(node, frozenset()) is None for node in nodes):
        for atom in found[0] & found[1]:
            passes.added.add(atom)
    return None


def _multiply(passes: Passes, call: Call) -> None:
    nodes = _nodes(call)
    if any(node in passes.squares for node in nodes):
        return _block(passes, call)
    if len(nodes) < 2:
        return None
    one, other = nodes[0], nodes[1]
    if one is other and call.name == "mul":
        passes.squares.add(call.node)
        return None
    shared = _of(_dims(call, one)) & _of(_dims(call, other))
    if call.name == "mul":
        for vector, x in ((one, other), (other, one)):
            axis = (_dims(call, x) or [Axis(1)])[-1]
            whole = len(shared) == 1 and shared == set(atoms(axis))
            if whole and vector in passes.vectors and x not in passes.vectors:
                name, offset = passes.vectors[vector]
                passes.norms.setdefault(shared.pop(), {})[name] = offset
                return None
    elif _of(_dims(call, other)) - shared:
        return _block(passes, call)
    for atom in shared:
        passes.blocked.setdefault(atom, f"{_text(call)} has a factor for each channel")
    return None


def _power(passes: Passes, call: Call) -> None:
    if call["exponent"] == 2 and not any(node in passes.squares for node in _nodes(call)):
        passes.squares.add(call.node)
    else:
        _block(passes, call)


def _reduce(passes: Passes, call: Call) -> None:
    """The mean of squares over a whole dimension stays the same under rotations; no other sum does."""
    x = _dims(call, call["self"]) or []
    dims = [call["dim"]] if isinstance(call["dim"], int) else (call["dim"] or range(len(x)))
    over = [x[dim] for dim in dims]
    square = call["self"] in passes.squares or (
        call.name == "linalg_vector_norm" and call["ord"] == 2
    )
    if square and len(over) == 1 and [atom.size for atom in _of(over)] == [over[0].size]:
        passes.normed |= _of(over)
        rest = [axis for axis in x if axis is not over[0]]
        return passes.block(rest, f"{_text(call)} sums squares over another dimension")
    if square or call.name == "linalg_vector_norm":
        return _block(passes, call)
    return passes.block(over, f"{_text(call)} is taken over it")


def _product(passes: Passes, call: Call) -> None:
    """A product with a weight reads one dimension and writes another; the others are no channels."""
    right = next((k for k in ("weight", "mat2", "batch2", "other") if call[k] is not None), "")
    left = next(k for k in ("input", "mat1", "batch1", "self") if call[k] is not None)
    if any(node in passes.squares for node in _nodes(call)) or (call["groups"] or 1) != 1:
        return _block(passes, call)
    x, weight = _dims(call, call[left]) or [], _dims(call, call[right]) or []
    if len(weight) < 2 or (len(x) < 2 and call.name != "linear"):
        return _block(passes, call)
    convolves = call.name.startswith("conv")
    read = weight[1] if convolves or call.name == "linear" else weight[-2]
    wrote = weight[0] if convolves or call.name == "linear" else weight[-1]
    first = len(x) - len(weight) + 1 if convolves else len(x) - 1
    for number, axis in enumerate(x):
        if number != first:
            passes.block([axis], f"it is not a dimension of channels for {_text(call)}")
    for axis in weight:
        if axis is not read and axis is not wrote:
            passes.block([axis], f"it is not a dimension of channels for {_text(call)}")
    parameters = call.sources.get(call[right])
    if parameters:
        passes.readings.append(Reading(parameters, read, call.owner))
    return None


def _attention(passes: Passes, call: Call) -> None:
    for key in ("query", "key", "value", "attn_mask"):
        axes = _dims(call, call[key]) or []
        passes.block(axes[:-1] if key == "value" else axes, f"{_text(call)} mixes it")


def _norm(passes: Passes, call: Call) -> None:
    """Norms over all channels: rotations go through where the weight is 1, and the mean stays as it is."""
    x = _dims(call, call["input"]) or []
    over = x[len(x) - len(call["normalized_shape"]) :]
    found = _of(over)
    passes.normed |= found
    if call["input"] in passes.squares or len(over) != 1 or len(found) != 1:
        return _block(passes, call)
    atom = found.pop()
    if over[0].size != atom.size:
        return _block(passes, call)
    if call["weight"] is not None:
        if call["weight"] not in passes.vectors:
            return _block(passes, call)
        name, offset = passes.vectors[call["weight"]]
        passes.norms.setdefault(atom, {})[name] = offset
    if call["bias"] is not None and passes.vectors.get(call["bias"], ("", 0.0))[1]:
        return _block(passes, call)
    if call.name == "layer_norm":
        passes.centered.setdefault(atom, call.owner)
    return None


def _nothing(passes: Passes, call: Call) -> None:
    """The result is made anew, or is zero."""


def _named(names: str, rule: Callable[[Passes, Call], None]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Callable[[Passes, Call], None]] = {
    **{name: _move for name in SHAPE_RULES if name not in ("glu", "pad", "constant_pad_nd")},
    **_named("dropout alpha_dropout feature_dropout neg index_put embedding getitem", _move),
    **_named("to _to_copy type_as contiguous alias detach lift_fresh_copy clone", _cast),
    **_named("add sub", _add),
    **_named("mul div", _multiply),
    "pow": _power,
    **_named("mean sum linalg_vector_norm", _reduce),
    **_named("linear matmul mm bmm addmm baddbmm conv1d conv2d conv3d", _product),
    **_named("grouped_mm_fallback _grouped_mm", _product),
    "scaled_dot_product_attention": _attention,
    **_named("layer_norm rms_norm", _norm),
    **_named("zeros_like empty_like", _nothing),
}


def passes_of(traced: Traced) -> Passes:
    """Visit the calls of a traced model, whose axes are known."""
    passes = Passes()
    for node, name in traced.held.items():
        if len(traced.tensors[name]) == 1:
            passes.vectors[node] = (name, 0.0)
    for call in traced.calls:
        if isinstance(call.output, (Tensor, list, tuple)):
            rule = _RULES.get(call.name) or _RULES.get(call.name.rstrip("_"), _block)
            rule(passes, call)
    return passes

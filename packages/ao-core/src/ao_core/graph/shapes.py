"""What operations that move elements about do to axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ao_core.graph.axes import Axis, factor, fix, join, product, segment, unify
from ao_core.graph.calls import Axes, Call

__all__ = ["SHAPE_RULES"]


def _reshape(call: Call) -> Any:
    """All elements in the same order, whatever the operation is called."""
    if call["dtype"] is not None:
        return call.unknown("seen as another dtype")
    found = factor(product(call.axes("self")), call.shape)
    return call.unknown("a view divides it where it does not end") if found is None else found


def _permute(call: Call) -> Axes:
    axes = call.axes("self")
    return [axes[dim] for dim in call["dims"]] if axes else axes


def _transpose(call: Call) -> Axes:
    axes = list(call.axes("self"))
    if axes:
        a, b = call.dim("dim0", len(axes)), call.dim("dim1", len(axes))
        axes[a], axes[b] = axes[b], axes[a]
    return axes


def _t(call: Call) -> Axes:
    return call.axes("self")[::-1]


def _expand(call: Call) -> Axes:
    axes, shape = call.axes("self"), call.shape
    sizes = [1] * (len(shape) - len(axes)) + [axis.size for axis in axes]
    old = [Axis(1)] * (len(shape) - len(axes)) + axes
    return [
        axis if size == wanted else Axis(wanted, fixed="the code expands to this size")
        for axis, size, wanted in zip(old, sizes, shape, strict=True)
    ]


def _expand_as(call: Call) -> Axes:
    return call.broadcast(call.axes("other"), call.axes("self"))


def _repeat(call: Call) -> Axes:
    axes, repeats = call.axes("self"), call["repeats"]
    old = [Axis(1)] * (len(repeats) - len(axes)) + axes
    return [product([_times(n), axis]) for n, axis in zip(repeats, old, strict=True)]


def _repeat_interleave(call: Call) -> Any:
    if not isinstance(call["repeats"], int) or call["dim"] is None:
        return call.unknown("repeated in a way that is not traced")
    axes = list(call.axes("self"))
    dim = call.dim("dim", len(axes))
    axes[dim] = product([axes[dim], _times(call["repeats"])])
    return axes


def _times(count: int) -> Axis:
    return Axis(count, fixed="repeated so many times")


def _cat(call: Call) -> Axes:
    operands = [call.axes_of[node] for node in call["tensors"]]
    operands = [axes for axes in operands if len(axes) == len(call.shape)]
    dim = call.dim("dim", len(call.shape))
    found = list(operands[0])
    for axes in operands[1:]:
        for i, axis in enumerate(axes):
            if i != dim:
                unify(found[i], axis)
    found[dim] = join(axes[dim] for axes in operands)
    return found


def _stack(call: Call) -> Axes:
    operands = [call.axes_of[node] for node in call["tensors"]]
    found = call.broadcast(*operands)
    dim = call.dim("dim", len(call.shape))
    return [*found[:dim], Axis(len(operands), fixed="tensors are stacked along it"), *found[dim:]]


def _pieces(call: Call, sizes: list[int], axes: Axes, dim: int) -> list[Axes] | None:
    found = segment(axes[dim], sizes)
    return None if found is None else [[*axes[:dim], part, *axes[dim + 1 :]] for part in found]


def _split(call: Call) -> Any:
    """`split`, `chunk` and their kin: the sizes are those of the outputs."""
    axes = call.axes("self")
    dim = call.dim("dim", len(axes))
    found = _pieces(call, [part.shape[dim] for part in call.output], axes, dim)
    return call.unknown("split where its parts do not end") if found is None else found


def _slice(call: Call) -> Any:
    axes = call.axes("self")
    dim = call.dim("dim", len(axes))
    size, length = axes[dim].size, call.shape[dim]
    if (call["step"] or 1) != 1:
        reason = "sliced in steps"
        fix(axes[dim], reason)
        return [*axes[:dim], Axis(length, fixed=reason), *axes[dim + 1 :]]
    start = min(max(start + size if (start := call["start"] or 0) < 0 else start, 0), size)
    found = _pieces(call, [start, length, size - start - length], axes, dim)
    return call.unknown("sliced where its parts do not end") if found is None else found[1]


def _select(call: Call) -> Axes:
    axes = call.axes("self")
    dim = call.dim("dim", len(axes))
    fix(axes[dim], "selected from by number")
    return axes[:dim] + axes[dim + 1 :]


def _index(call: Call) -> Axes:
    """Indexed by tensors: their common shape is where they are, or in front if they are not together."""
    axes, indices = call.axes("self"), call["indices"]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    for dim in used:
        fix(axes[dim], "indexed by number")
    together = used == list(range(used[0], used[0] + len(used)))
    first = used[0] if together else 0
    rest = [axis for dim, axis in enumerate(axes) if dim not in used]
    count = len(call.shape) - len(rest)
    made = call.fresh(call.shape[first : first + count], "indexed by number")
    return [*rest[:first], *made, *rest[first:]]


def _index_select(call: Call) -> Axes:
    axes = list(call.axes("self"))
    dim = call.dim("dim", len(axes))
    fix(axes[dim], "indexed by number")
    axes[dim] = Axis(call.shape[dim], fixed="indexed by number")
    return axes


def _unbind(call: Call) -> list[Axes]:
    return [_select(call) for _ in call.output]


def _pad(call: Call) -> Axes:
    """Pairs of how much goes before and behind, the last dimension first."""
    axes, pad = list(call.axes("self")), call["pad"]
    for number in range(len(pad) // 2):
        if pad[2 * number] or pad[2 * number + 1]:
            fix(axes[-1 - number], "padded")
            axes[-1 - number] = Axis(call.shape[-1 - number], fixed="padded")
    return axes


def _glu(call: Call) -> Any:
    axes = call.axes("self")
    dim = call.dim("dim", len(axes))
    half = axes[dim].size // 2
    found = _pieces(call, [half, half], axes, dim)
    if found is None:
        return call.unknown("split where its parts do not end")
    unify(found[0][dim], found[1][dim])
    return found[0]


#: operation -> rule
SHAPE_RULES: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        _reshape,
    ),
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "expand_as": _expand_as,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    "index": _index,
    "index_select": _index_select,
    "constant_pad_nd": _pad,
    "pad": _pad,
    "glu": _glu,
}

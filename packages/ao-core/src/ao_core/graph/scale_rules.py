"""What operations do to the scales of tensors. An operation without a rule lets no scale through."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ao_core.graph.calls import Call
from ao_core.graph.labels import compact
from ao_core.graph.scale_values import NONE, Scaling, Value

__all__ = ["SCALE_RULES", "block_all", "operands", "rule_for", "value_of"]


def value_of(state: Scaling, item: Any) -> Value:
    """The scale of an argument; numbers and inputs have none."""
    found = state.values.get(item, NONE) if isinstance(item, fx.Node) else NONE
    return found if isinstance(found, Value) else NONE


def operands(state: Scaling, call: Call) -> list[Value]:
    """The scales of all tensors among the arguments, also of those in lists."""
    return [value_of(state, item) for item in pytree.tree_leaves(list(call.bound.values()))]


def block_all(state: Scaling, call: Call) -> Value:
    """Nothing that comes in can be scaled."""
    state.block(*operands(state, call))
    return NONE


def _first(call: Call) -> Any:
    return next(item for item in call.bound.values() if isinstance(item, fx.Node))


def _shape(item: Any) -> list[int]:
    value = item.meta["val"] if isinstance(item, fx.Node) else item
    return list(value.shape) if isinstance(value, Tensor) else []


def _same(state: Scaling, call: Call) -> Value:
    if not call.output.is_floating_point():
        return block_all(state, call)
    return value_of(state, _first(call))


def _homogeneous(state: Scaling, call: Call) -> Value:
    """f(s·x) = s·f(x) for positive s."""
    x, *others = [item for item in call.bound.values() if isinstance(item, fx.Node)]
    state.block(*(value_of(state, item) for item in others))
    found = state.alive(value_of(state, x))
    for term in found.terms:
        state.labels.require_positive(term)
    return replace(found, parameter=None)


def _negated(state: Scaling, call: Call) -> Value:
    return replace(_same(state, call), parameter=None)


def _made(state: Scaling, call: Call) -> Value:
    return NONE


def _reshaped(state: Scaling, call: Call) -> Value:
    """All elements in the same order."""
    first = _first(call)
    if call["dtype"] is not None:
        return block_all(state, call)
    terms = state.alive(value_of(state, first)).terms
    return Value(tuple(compact(t.expand(_shape(first)).reshape(call.shape)) for t in terms))


def _moved(state: Scaling, call: Call) -> Any:
    """Run the operation itself on the labels: it only moves elements about."""
    first = _first(call)
    if isinstance(call["repeats"], fx.Node):
        return block_all(state, call)
    found = [
        _run(call, {first: term.expand(_shape(first))})
        for term in state.alive(value_of(state, first)).terms
    ]
    if isinstance(call.output, Tensor):
        return Value(tuple(compact(labels) for labels in found))
    parts = zip(*found, strict=True) if found else [()] * len(call.output)
    return [Value(tuple(compact(labels) for labels in part)) for part in parts]


def _run(call: Call, labels: dict[fx.Node, Tensor]) -> Any:
    """The operation on other tensors; those that are not given are zeros."""

    def real(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return labels[item] if item in labels else torch.zeros(_shape(item), dtype=torch.int64)
        return item

    return call.node.target(*pytree.tree_map(real, call.node.args), **call.node.kwargs)  # type: ignore[operator]


def _permuted(state: Scaling, call: Call) -> Value:
    """As `_moved`, where no dimension is divided: labels keep their sizes of 1."""
    first = _first(call)
    terms = state.alive(value_of(state, first)).terms
    return Value(tuple(_run(call, {first: term}) for term in terms))


def _joined(state: Scaling, call: Call) -> Value:
    tensors = call["tensors"]
    labels = {
        item: state.single(value_of(state, item), len(_shape(item))).expand(_shape(item))
        for item in tensors
    }
    return state.alive(Value((compact(_run(call, labels)),)))


def _indexed(state: Scaling, call: Call) -> Value:
    """By numbers that the inputs decide: nothing varies along the dimensions that are indexed."""
    x = _first(call)
    if call["indices"] is not None:
        dims = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    else:
        dims = [call.dim("dim", len(_shape(x)))]
    terms = [state.constant(t, dims) for t in state.alive(value_of(state, x)).terms]
    return Value(tuple(compact(_run(call, {x: t.expand(_shape(x))})) for t in terms))


def _sum(state: Scaling, call: Call) -> Value:
    """A sum over dimensions along which the scale does not vary."""
    x, ndim = _first(call), len(_shape(_first(call)))
    dims = [call["dim"]] if isinstance(call["dim"], int) else (call["dim"] or range(ndim))
    over = {dim % max(ndim, 1) for dim in dims}
    terms = [state.constant(t, over) for t in state.alive(value_of(state, x)).terms]
    if not call["keepdim"]:
        terms = [t.reshape([n for dim, n in enumerate(t.shape) if dim not in over]) for t in terms]
    return Value(tuple(terms))


def _add(state: Scaling, call: Call) -> Value:
    one, other = call["self"], call["other"]
    found = value_of(state, one)
    plain = isinstance(other, (int, float)) and call["alpha"] in (None, 1)
    if found.parameter and plain and call.name == "add":
        name, offset = found.parameter
        return Value(found.terms, (name, offset + other))
    return state.equal(len(call.shape), found, value_of(state, other))


def _mul(state: Scaling, call: Call) -> Value:
    found = [state.alive(value_of(state, call[key])) for key in ("self", "other")]
    return Value(tuple(_leading(t, call) for value in found for t in value.terms))


def _div(state: Scaling, call: Call) -> Value:
    if call["rounding_mode"] is not None:
        return block_all(state, call)
    found = [state.alive(value_of(state, call[key])) for key in ("self", "other")]
    signed = [_leading(t, call) for t in found[0].terms] + [
        -_leading(t, call) for t in found[1].terms
    ]
    return Value(tuple(signed))


def _leading(term: Tensor, call: Call) -> Tensor:
    return term.reshape([1] * (len(call.shape) - term.ndim) + list(term.shape))


def _masked(state: Scaling, call: Call) -> Value:
    return _same(state, call) if call["value"] == 0 else block_all(state, call)


def _is_weight(call: Call, key: str) -> bool:
    return bool(call.sources.get(call[key]))


def _linear(state: Scaling, call: Call) -> Value:
    weight = value_of(state, call["weight"])
    ndim = max(len(call.shape), 2)
    transposed = Value(tuple(term.t() for term in weight.terms))
    x = value_of(state, call["input"])
    if len(call.shape) < 2:
        return block_all(state, call)
    found = state.contract(x, transposed, ndim, reads=_is_weight(call, "weight"))
    return (
        found if call["bias"] is None else state.equal(ndim, found, value_of(state, call["bias"]))
    )


def _matmul(state: Scaling, call: Call, left: str = "self", right: str = "other") -> Value:
    if min(len(_shape(call[left])), len(_shape(call[right]))) < 2:
        return block_all(state, call)
    a, b = value_of(state, call[left]), value_of(state, call[right])
    reads = _is_weight(call, right) and not _is_weight(call, left)
    found = state.contract(a, b, len(call.shape), reads=reads)
    if left != "self":  # addmm, baddbmm
        return state.equal(len(call.shape), found, value_of(state, call["self"]))
    return found


def _grouped(state: Scaling, call: Call) -> Value:
    """Each expert's matrix for its own rows: all experts have one scale."""
    x, weight = call["input"] or call["self"], call["weight"] or call["mat2"]
    if len(_shape(x)) != 2 or len(_shape(weight)) != 3 or call["bias"] is not None:
        return block_all(state, call)
    terms = state.alive(value_of(state, weight)).terms
    for term in terms:
        if term.shape[0] > 1:  # it varies over the experts
            state.labels.zero(term)
    flat = state.alive(Value(tuple(term[0] for term in terms)))
    return state.contract(value_of(state, x), flat, 2, reads=bool(call.sources.get(weight)))


def _attention(state: Scaling, call: Call) -> Value:
    """softmax(QKᵀ)V: scales of q and k cancel, those of v go on."""
    ndim = len(call.shape)
    q, k, v = (_heads(state, call, key) for key in ("query", "key", "value"))
    transposed = Value(tuple(term.transpose(-1, -2) for term in k.terms))
    state.block(
        state.contract(q, transposed, ndim, reads=False), value_of(state, call["attn_mask"])
    )
    return Value(tuple(state.constant(term, [-2]) for term in v.terms))


def _heads(state: Scaling, call: Call, key: str) -> Value:
    """With the heads of queries: those of keys and values may be shared by several."""
    terms = state.alive(value_of(state, call[key])).terms
    if call["enable_gqa"]:
        times = _shape(call["query"])[-3] // _shape(call[key])[-3]
        terms = tuple(t.repeat_interleave(times, -3) if t.shape[-3] > 1 else t for t in terms)
    return Value(terms)


def _layer_norm(state: Scaling, call: Call) -> Value:
    """What comes in has the scale 1, since it is divided by a statistic of all channels."""
    state.block(value_of(state, call["input"]))
    found = [value_of(state, call[key]) for key in ("weight", "bias") if call[key] is not None]
    if call["weight"] is None:
        state.block(*found)
        return NONE
    return state.equal(len(call.shape), *found)


def _channel_norm(state: Scaling, call: Call) -> Value:
    """batch_norm and group_norm: weights belong to the second dimension."""
    state.block(
        *(value_of(state, call[k]) for k in ("input", "running_mean", "running_var") if call[k])
    )
    found = [value_of(state, call[key]) for key in ("weight", "bias") if call[key] is not None]
    if call["weight"] is None:
        state.block(*found)
        return NONE
    flat = state.equal(1, *found)
    tail = [1] * (len(call.shape) - 2)
    return Value(tuple(term.reshape(1, -1, *tail) for term in flat.terms))


def _embedding(state: Scaling, call: Call) -> Value:
    terms = value_of(state, call["weight"]).terms
    for term in terms:
        if term.shape[0] > 1:
            state.labels.zero(term)
    alive = state.alive(Value(terms)).terms
    return Value(tuple(_leading(term[0], call) for term in alive))


def _conv(state: Scaling, call: Call) -> Value:
    """Channels of the input cancel with the weight's, those of its rows go on; windows have no scale."""
    x, weight, groups = call["input"], call["weight"], call["groups"] or 1
    ndim = len(_shape(weight))
    if len(_shape(x)) != ndim or not isinstance(groups, int):
        return block_all(state, call)
    rows: list[Tensor] = []
    columns: list[Tensor] = []
    for term in state.alive(value_of(state, weight)).terms:
        if any(n > 1 for n in term.shape[2:]) or min(term.shape[:2]) > 1:
            state.labels.zero(term)
        else:
            (rows if term.shape[0] > 1 else columns).append(term)
    incoming = [state.constant(t, range(2, ndim)) for t in state.alive(value_of(state, x)).terms]
    one = state.single(Value(tuple(incoming)), ndim)
    one = state.constant(one, [0]).expand(1, _shape(x)[1], *[1] * (ndim - 2))
    passed = Value()
    if _shape(weight)[1] == 1 and groups > 1:  # each row of the weight reads one channel
        passed = Value((one.repeat_interleave(_shape(weight)[0] // groups, 1),))
    else:
        column = state.single(Value(tuple(columns)), ndim)
        state.readers.append(column)
        state.labels.unify(one.reshape(groups, -1, *[1] * (ndim - 2)), -column)
    found = Value(tuple(term.transpose(0, 1) for term in rows) + state.alive(passed).terms)
    if call["bias"] is None:
        return found
    bias = value_of(state, call["bias"])
    tail = [1] * (ndim - 2)
    shaped = Value(tuple(term.reshape(1, -1, *tail) for term in bias.terms))
    # the bias follows one vector only: that of the rows
    return state.equal(ndim, Value((state.single(found, ndim),)), shaped)


def _pool(state: Scaling, call: Call) -> Any:
    """Means and maxima of windows; a maximum wants positive scales."""
    count = int(re.findall(r"\d", call.name)[0])
    ndim = len(_shape(_first(call)))
    found = state.alive(_homogeneous(state, call) if "max" in call.name else _same(state, call))
    terms = tuple(state.constant(t, range(ndim - count, ndim)) for t in found.terms)
    return Value(terms) if isinstance(call.output, Tensor) else [Value(terms), NONE]


def _glu(state: Scaling, call: Call) -> Value:
    """The first half times a gate that cannot be scaled."""
    x = _first(call)
    dim, terms = call.dim("dim", len(_shape(x))), []
    for term in state.alive(value_of(state, x)).terms:
        whole = term.expand(_shape(x)) if term.shape[dim] > 1 else term.expand_as(term)
        if term.shape[dim] == 1:
            state.labels.zero(term)
            continue
        half, gate = whole.chunk(2, dim)
        state.labels.zero(compact(gate))
        terms.append(compact(half))
    return Value(tuple(terms))


def _getitem(state: Scaling, call: Call) -> Value:
    found = state.values.get(call["0"], NONE)
    return found[call["1"]] if isinstance(found, list) else NONE


Rule = Callable[[Scaling, Call], Any]


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _matmul_of(left: str, right: str) -> Rule:
    return lambda state, call: _matmul(state, call, left, right)


#: operation (without overload) -> rule
SCALE_RULES: dict[str, Rule] = {
    **_named("to _to_copy type_as contiguous alias detach lift_fresh_copy clone", _same),
    **_named("dropout alpha_dropout feature_dropout", _same),
    "neg": _negated,
    **_named("relu leaky_relu abs prelu", _homogeneous),
    **_named("zeros_like ones_like full_like empty_like rand_like randn_like", _made),
    **_named("view reshape _unsafe_view flatten unflatten squeeze unsqueeze", _reshaped),
    **_named(
        "expand repeat repeat_interleave split split_with_sizes chunk slice select unbind", _moved
    ),
    **_named("permute transpose t", _permuted),
    **_named("cat concat stack", _joined),
    **_named("index index_select", _indexed),
    **_named("sum mean", _sum),
    **_named("add sub", _add),
    "mul": _mul,
    "div": _div,
    "masked_fill": _masked,
    "linear": _linear,
    "matmul": _matmul,
    **_named("mm bmm", _matmul_of("self", "mat2")),
    "addmm": _matmul_of("mat1", "mat2"),
    "baddbmm": _matmul_of("batch1", "batch2"),
    **_named("grouped_mm_fallback _grouped_mm", _grouped),
    "scaled_dot_product_attention": _attention,
    **_named("layer_norm rms_norm", _layer_norm),
    **_named("batch_norm instance_norm group_norm", _channel_norm),
    "embedding": _embedding,
    **_named("conv1d conv2d conv3d", _conv),
    **_named("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d", _pool),
    **_named("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", _pool),
    "glu": _glu,
    "getitem": _getitem,
}


def rule_for(name: str) -> Rule | None:
    """The rule of an operation, also of its kind that writes in place."""
    return SCALE_RULES.get(name) or SCALE_RULES.get(name.rstrip("_"))

"""What operations that compute do to axes: which they share, sum over, mix, or make."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ao_core.graph.axes import Axis, factor, fix, product, unify
from ao_core.graph.calls import Axes, Call
from ao_core.graph.shapes import SHAPE_RULES

__all__ = ["RULES", "pointwise"]


def pointwise(call: Call) -> Axes:
    """Each element of the result depends on the elements at its place."""
    return call.broadcast(*call.tensors())


def _alike(call: Call) -> Axes:
    """Of the shape of the first argument, element by element."""
    return next(call.tensors())


def _made(call: Call) -> Axes:
    return call.fresh(call.shape, "a tensor that the code makes in this size")


def _linear(call: Call) -> Axes:
    x, weight = call.axes("input"), call.axes("weight")
    call.contract("input", x[-1], "weight", weight[1])
    for bias in call.given("bias"):
        unify(weight[0], bias[0])
    call.declare(in_features=weight[1], out_features=weight[0])
    return [*x[:-1], weight[0]]


def _matmul(call: Call, left: str = "self", right: str = "other") -> Any:
    a, b = call.axes(left), call.axes(right)
    if min(len(a), len(b)) < 2:
        return call.unknown(f"{call.name} with a vector is not traced")
    call.contract(left, a[-1], right, b[-2])
    found = [*call.broadcast(a[:-2], b[:-2]), a[-2], b[-1]]
    return found if left == "self" else call.broadcast(found, call.axes("self"))


def _grouped_mm(call: Call) -> Any:
    """Rows that belong to experts, one matrix (K, N) for each: all experts lose the same channels."""
    left, right = ("input", "weight") if call["weight"] is not None else ("self", "mat2")
    x, weight = call.axes(left), call.axes(right)
    if len(x) != 2 or len(weight) != 3:
        return call.unknown("its operands are not the rows and the matrices of experts")
    fix(weight[0], "the experts are counted")
    call.contract(left, x[-1], right, weight[1])
    for bias in call.given("bias"):
        unify(weight[2], bias[-1])
    return [x[0], weight[2]]


def _index_put(call: Call) -> Any:
    """Values go where indices say: those dimensions are fixed, the others are those of the values."""
    axes, values, indices = call.axes("self"), call.axes("values"), call["indices"]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if used != list(range(len(used))):
        return call.unknown("written to in a way that is not traced")
    for axis in axes[: len(used)]:
        fix(axis, "indexed by number")
    for one, other in zip(reversed(axes[len(used) :]), reversed(values), strict=False):
        if other.size != 1:
            unify(one, other)
    for axis in values[: max(len(values) - len(axes) + len(used), 0)]:
        fix(axis, "indexed by number")
    return axes


def _conv(call: Call) -> Any:
    """Groups share the position of a channel inside them; depthwise, a group is a channel."""
    x, weight, groups = call.axes("input"), call.axes("weight"), call["groups"] or 1
    first = len(x) - len(weight) + 1  # the dimension of channels: 0 without a batch
    inside = factor(x[first], [groups, x[first].size // groups])
    outside = factor(weight[0], [groups, weight[0].size // groups])
    if inside is None or outside is None:
        return call.unknown("its groups end where its parts do not")
    unify(inside[0], outside[0])
    call.contract("input", inside[1], "weight", weight[1])
    for bias in call.given("bias"):
        unify(weight[0], bias[0])
    call.declare(in_channels=x[first], out_channels=weight[0], groups=outside[0])
    return [*x[:first], weight[0], *_window(call, x[first + 1 :], weight[2:])]


def _conv_transpose(call: Call) -> Any:
    x, weight, groups = call.axes("input"), call.axes("weight"), call["groups"] or 1
    first = len(x) - len(weight) + 1
    unify(x[first], weight[0])
    inside = factor(weight[0], [groups, weight[0].size // groups])
    if inside is None:
        return call.unknown("its groups end where its parts do not")
    call.contract("input", inside[1], "weight", inside[1])
    out = product([inside[0], weight[1]])
    for bias in call.given("bias"):
        unify(out, bias[0])
    call.declare(in_channels=weight[0], out_channels=out, groups=inside[0])
    return [*x[:first], out, *_window(call, x[first + 1 :], weight[2:])]


def _window(call: Call, *spatial: Axes) -> Axes:
    """The positions that a window makes; nothing of it, or of what it slides over, can go."""
    for axis in (axis for axes in spatial for axis in axes):
        fix(axis, f"{call.name} slides over it")
    return call.fresh(call.shape[len(call.shape) - len(spatial[0]) :], "positions of a window")


def _pool(call: Call) -> Any:
    x, count = next(call.tensors()), int(re.findall(r"\d", call.name)[0])
    output = call.output if isinstance(call.output, Tensor) else call.output[0]
    for axis in x[len(x) - count :]:
        fix(axis, f"{call.name} slides over it")
    made = call.fresh(output.shape[len(x) - count :], "positions of a window")
    found = [*x[: len(x) - count], *made]
    return found if isinstance(call.output, Tensor) else [found, found]


def _upsample(call: Call) -> Axes:
    x = next(call.tensors())
    for axis in x[2:]:
        fix(axis, f"{call.name} resizes it")
    return [*x[:2], *call.fresh(call.shape[2:], "a size that the code chooses")]


def _batch_norm(call: Call) -> Axes:
    x = call.axes("input")
    for parameter in call.given("weight", "bias", "running_mean", "running_var"):
        unify(x[1], parameter[0])
    call.declare(num_features=x[1])
    return x


def _layer_norm(call: Call) -> Axes:
    x = call.axes("input")
    over = x[len(x) - len(call["normalized_shape"]) :]
    for parameter in call.given("weight", "bias"):
        for axis, other in zip(over, parameter, strict=True):
            unify(axis, other)
    for axis in over:
        fix(axis, f"{call.name} divides by a statistic over it", inexact=True)
    call.declare(normalized_shape=tuple(over))
    return x


def _group_norm(call: Call) -> Any:
    x, groups = call.axes("input"), call["num_groups"]
    found = factor(x[1], [groups, x[1].size // groups])
    if found is None:
        return call.unknown("its groups end where its parts do not")
    fix(found[1], "group_norm divides by a statistic over it", inexact=True)
    for parameter in call.given("weight", "bias"):
        unify(x[1], parameter[0])
    call.declare(num_groups=found[0], num_channels=x[1])
    return x


def _prelu(call: Call) -> Axes:
    x, weight = call.axes("self"), call.axes("weight")
    if weight and weight[0].size > 1:
        unify(x[1], weight[0])
        call.declare(num_parameters=weight[0])
    return x


def _softmax(call: Call) -> Axes:
    x = call.axes("self")
    if x:
        fix(x[call.dim("dim", len(x))], f"{call.name} divides by a sum over it", inexact=True)
    return x


def _reduce(call: Call) -> Any:
    """Sums, means and norms over some dimensions."""
    if not isinstance(call.output, Tensor):
        return call.unknown(f"{call.name} with several results is not traced")
    x, dims = call.axes("self"), call["dim"]
    dims = [dims] if isinstance(dims, int) else (dims or range(len(x)))
    over = {dim % max(len(x), 1) for dim in dims}
    for dim, axis in enumerate(x):
        if dim in over:
            fix(axis, f"{call.name} is taken over it", inexact=True)
    keep = bool(call["keepdim"])
    return [
        Axis(1) if dim in over else axis for dim, axis in enumerate(x) if keep or dim not in over
    ]


def _outer(call: Call) -> Axes:
    return [*call.axes("self"), *call.axes("vec2")]


def _along(call: Call) -> Axes:
    """Each element depends on those before it along a dimension."""
    x = list(call.axes("self"))
    dim = call.dim("dim", len(x))
    fix(x[dim], f"{call.name} runs along it")
    x[dim] = Axis(call.shape[dim], fixed=f"{call.name} runs along it")
    return x


def _embedding(call: Call) -> Axes:
    weight = call.axes("weight")
    fix(weight[0], "embedding looks rows up by number")
    call.declare(num_embeddings=weight[0], embedding_dim=weight[1])
    return [*call.axes("indices"), weight[1]]


def _attention(call: Call) -> Axes:
    """softmax(QKᵀ)V; the width of a head is in the scale, and no weight reads it."""
    q, k, v = call.axes("query"), call.axes("key"), call.axes("value")
    if call["enable_gqa"]:
        k, v = _grouped(q, k), _grouped(q, v)
    batch = call.broadcast(q[:-2], k[:-2], v[:-2])
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    fix(q[-1], "attention sums over it, and no weight does that could be told to skip it")
    fix(k[-2], "attention divides by a sum over it")
    for mask in call.given("attn_mask"):
        call.broadcast(mask, [*batch, q[-2], k[-2]])
    return [*batch, q[-2], v[-1]]


def _grouped(query: Axes, axes: Axes) -> Axes:
    """Keys or values as if each head were repeated for the heads of queries that share it."""
    times = Axis(query[-3].size // axes[-3].size, fixed="heads that share keys and values")
    return [*axes[:-3], product([axes[-3], times]), *axes[-2:]]


def _named(names: str, rule: Callable[[Call], Any]) -> dict[str, Callable[[Call], Any]]:
    return dict.fromkeys(names.split(), rule)


#: operation (without overload) -> rule; operations that torch calls pointwise need none
RULES: dict[str, Callable[[Call], Any]] = {
    **SHAPE_RULES,
    **_named("dropout alpha_dropout feature_dropout feature_alpha_dropout", _alike),
    **_named("to _to_copy type_as contiguous alias detach detach_ lift_fresh_copy", _alike),
    **_named("zeros_like ones_like full_like empty_like rand_like randn_like", _alike),
    **_named("new_zeros new_ones new_full new_empty arange zeros ones full empty eye", _made),
    **_named("scalar_tensor linspace", _made),
    "linear": _linear,
    "matmul": _matmul,
    **_named("mm bmm", partial(_matmul, right="mat2")),
    "addmm": partial(_matmul, left="mat1", right="mat2"),
    "baddbmm": partial(_matmul, left="batch1", right="batch2"),
    **_named("conv1d conv2d conv3d", _conv),
    **_named("conv_transpose1d conv_transpose2d conv_transpose3d", _conv_transpose),
    **_named("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d", _pool),
    **_named("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", _pool),
    **_named("max_pool2d_with_indices max_pool3d_with_indices", _pool),
    **_named("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", _pool),
    **_named("upsample_nearest1d upsample_nearest2d upsample_nearest3d", _upsample),
    **_named("upsample_linear1d upsample_bilinear2d upsample_bicubic2d", _upsample),
    **_named("batch_norm instance_norm", _batch_norm),
    **_named("layer_norm rms_norm", _layer_norm),
    "group_norm": _group_norm,
    "prelu": _prelu,
    **_named("softmax log_softmax _softmax _log_softmax", _softmax),
    **_named("sum mean amax amin var std linalg_vector_norm", _reduce),
    **_named("grouped_mm_fallback _grouped_mm", _grouped_mm),
    "index_put": _index_put,
    "outer": _outer,
    **_named("cumsum cumprod diff", _along),
    **_named("__and__ __or__ __xor__", pointwise),
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
}

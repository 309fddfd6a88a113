"""Weights whose values a fake-quantize rule rounds, for whatever reads them.

A function of torch gets what the rule makes of the weight in its place, `rounded`, with a gradient. What
arrives below autograd only, e.g. as the shard of a `DTensor`, gets what the weight will be stored as, forward
and backward: autograd's own formulas then are the straight-through estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.autograd import signed
from ao_core.compute.fake_quantize import format_of, rule_of
from ao_core.compute.matmuls import DELAYED, rule_name
from ao_core.compute.weight import FUNCTIONS, MATMULS, ComputeWeight, on_memory
from ao_core.errors import UnsupportedOp
from ao_core.tensor.autocast import without_autocast

__all__ = [
    "deployed",
    "is_delayed",
    "needs_no_extras",
    "on_rounded",
    "read",
    "rounded",
    "stored",
    "without_transforms",
]

aten = torch.ops.aten


def is_delayed(weight: Any) -> bool:
    """Whether the rule of a weight waits, so that its matmuls are in high precision."""
    spec = weight.matmuls.output
    return spec is not None and bool(spec.option(DELAYED, False))


def needs_no_extras(weight: Any) -> bool:
    """Whether a weight has a rule that reads the weight alone."""
    if not isinstance(weight, ComputeWeight) or not rule_name(weight.matmuls.output):
        return False
    rule = rule_of(weight.matmuls.output)
    return rule is not None and rule.initial is None


def without_transforms(weight: Tensor) -> Tensor:
    """What the transforms of `torch.func` have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(weight):
        weight = torch._C._functorch.get_unwrapped(weight)
    return weight


@signed
class _Memory(torch.autograd.Function):
    """The memory of a weight, without a copy."""

    @staticmethod
    def forward(weight: ComputeWeight) -> Tensor:
        return aten.alias.default(weight.memory)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def rounded(weight: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    """What the rule of a weight makes of it, a `QTensor` or dense, with gradients; its memory while it waits.

    Args:
        weight: one with a rule, perhaps transposed, perhaps wrapped by transforms of `torch.func`.
        extras: the further tensors that the rule reads.
    """
    inner: Any = without_transforms(weight)
    spec, rule = inner.matmuls.output, rule_of(inner.matmuls.output)
    assert rule is not None
    # transforms know products, but not an operator of ours
    values: Tensor = _Memory.apply(weight) if inner is weight else weight * 1  # type: ignore[no-untyped-call]
    if is_delayed(inner):
        return values
    turn = bool(inner.transposed) != bool(spec.option("in_out", False))
    # the weight is rounded as it is, not as autocast would cast it
    with without_autocast(inner):
        values = rule.apply(values.transpose(-2, -1) if turn else values, format_of(spec), extras)
    return values.transpose(-2, -1) if turn else values


def deployed(weight: ComputeWeight, extras: Mapping[str, Tensor]) -> Tensor:
    """`rounded` without a gradient."""
    with torch.no_grad():
        return rounded(weight, extras)


def on_rounded(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that reads weights as their rules round them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
        if not any(map(needs_no_extras, leaves)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves = [rounded(leaf, {}) if needs_no_extras(leaf) else leaf for leaf in leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(leaves, tree)
        return func(*args, **kwargs)

    return call


#: but those that `linear`, `methods` and `experts` know
_READING = (
    F.bilinear,
    F.embedding,
    F.embedding_bag,
    F.multi_head_attention_forward,
    torch.baddbmm,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    torch.einsum,
    torch.embedding,
)
FUNCTIONS.update({func: on_rounded(func) for func in _READING})

# -- below autograd --------------------------------------------------------------------------------


def stored(weight: Any) -> Any:
    """What a weight with a rule will be stored as, or its memory while it waits; anything else itself.

    Raises:
        UnsupportedOp: the rule reads further tensors.
    """
    if not isinstance(weight, ComputeWeight) or not rule_name(weight.matmuls.output):
        return weight
    if not needs_no_extras(weight):
        raise UnsupportedOp(
            f"an operation with a weight that the fake-quantize rule {rule_name(weight.matmuls.output)!r} "
            "rounds: the rule reads further parameters of the weight's module; call the module"
        )
    return deployed(weight, {})


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on what weights will be stored as; of weights without a rule, on their memory."""
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    # lookups in a weight whose rule reads further tensors are exact, as those in one that only matmuls cast
    found = [stored(leaf) if needs_no_extras(leaf) else leaf for leaf in leaves]
    if all(new is old for new, old in zip(found, leaves, strict=True)):
        return on_memory(func, args, kwargs)
    plain = [leaf.memory if isinstance(leaf, ComputeWeight) else leaf for leaf in found]
    args, kwargs = torch.utils._pytree.tree_unflatten(plain, tree)
    return func(*args, **kwargs)


_BELOW = (
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._trilinear.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.embedding.default,
    aten.mv.default,
)
MATMULS.update(dict.fromkeys(_BELOW, read))

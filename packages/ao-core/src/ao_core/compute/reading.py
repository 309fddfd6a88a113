"""Operations below autograd that read a weight whose fake-quantize rule needs no further tensors.

They get what the weight will be stored as in its place, forward and backward. Autograd's own formulas then are
the straight-through estimator: the gradient of the stored values is taken to be that of the weight. Linear
layers do not come here, but where torch takes them apart itself, as for `DTensor`s (see `fake_linear`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ao_core.compute.fake_quantize import rule_of
from ao_core.compute.matmuls import DELAYED, rule_name
from ao_core.compute.weight import MATMULS, ComputeWeight, on_memory
from ao_core.errors import UnsupportedOp

__all__ = ["deployed", "is_delayed", "needs_no_extras", "read", "stored"]

aten = torch.ops.aten


def is_delayed(weight: ComputeWeight) -> bool:
    """Whether the rule of a weight waits, so that its matmuls are in high precision."""
    spec = weight.matmuls.output
    return spec is not None and bool(spec.option(DELAYED, False))


def needs_no_extras(weight: Any) -> bool:
    """Whether a weight has a rule that reads the weight alone."""
    if not isinstance(weight, ComputeWeight) or not rule_name(weight.matmuls.output):
        return False
    rule = rule_of(weight.matmuls.output)
    return rule is not None and rule.initial is None


def deployed(weight: ComputeWeight, extras: Mapping[str, Tensor]) -> Tensor:
    """What the rule of a weight makes of it, without a gradient: a `QTensor`, or dense values.

    Args:
        weight: one with a rule, perhaps transposed.
        extras: the further tensors that the rule reads.
    """
    spec, rule = weight.matmuls.output, rule_of(weight.matmuls.output)
    assert spec is not None
    assert rule is not None
    turn = bool(weight.transposed) != bool(spec.option("in_out", False))
    with torch.no_grad():
        memory = weight.memory.detach()
        values = rule.apply(memory.t() if turn else memory, spec, extras)
        return values.t() if turn else values


def stored(weight: Any) -> Any:
    """What a weight with a rule will be stored as; anything else itself.

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
    return weight.memory if is_delayed(weight) else deployed(weight, {})


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on what weights will be stored as; of weights without a rule, on their memory."""
    leaves, tree = torch.utils._pytree.tree_flatten((args, kwargs))
    found = [stored(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(found, leaves, strict=True)):
        return on_memory(func, args, kwargs)
    plain = [leaf.memory if isinstance(leaf, ComputeWeight) else leaf for leaf in found]
    args, kwargs = torch.utils._pytree.tree_unflatten(plain, tree)
    return func(*args, **kwargs)


#: but those that `linear` and `experts` know
_READING = (
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._trilinear.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.dot.default,
    aten.einsum.default,
    aten.embedding.default,
    aten.mv.default,
)
MATMULS.update(dict.fromkeys(_READING, read))

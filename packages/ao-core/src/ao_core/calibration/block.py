"""A block of a model as algorithms see it that solve for all of its weights at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ao_core.calibration.statistics import Statistics
from ao_core.calibration.stepping import unstepped_weight
from ao_core.config import Config
from ao_core.numerics.fast_dense import fast_dense
from ao_core.records import Target
from ao_core.targets import Decision

__all__ = ["Block", "BlockWeight", "called_with", "float_leaves"]


@dataclass(frozen=True)
class Block:
    """A block of a model, the inputs that were recorded for it, and the outputs that are wanted.

    Example: the error of the first batch with other weights is
    ``(block.run(0, {"layers.3.mlp.up.weight": w})[0] - block.wanted(0)[0]).square().mean()``.
    """

    #: of the block in the model
    name: str
    #: how many batches of inputs this process has
    batches: int
    #: (number of a batch, by name the values of weights in place of the block's own) -> the floating-point
    #: tensors that it returns. Inputs are those that the rewritten blocks before it make. Gradients of the
    #: values follow where the caller lets torch record them
    run: Callable[[int, Mapping[str, Tensor]], list[Tensor]]
    #: (number of a batch) -> what it returned in the model as it was, on the inputs that this made
    wanted: Callable[[int], list[Tensor]]
    #: tensors -> their sums over all processes, each of which has batches of its own and calls this equally
    #: often; with one process they are what they were
    summed: Callable[[Sequence[Tensor]], list[Tensor]] = list


@dataclass(frozen=True)
class BlockWeight:
    """One weight of a block: what `Algorithm.solve` gets for a weight."""

    #: its name in the model
    fqn: str
    #: (E, out, in)
    values: Tensor
    #: of the inputs of each of the E matrices, while the block's weights are as they were
    statistics: tuple[Statistics, ...]
    config: Config
    target: Target


def float_leaves(returned: Any) -> list[Tensor]:
    """The floating-point tensors among what a module returned."""
    leaves = pytree.tree_leaves(returned)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def called_with(
    block: nn.Module,
    entries: Iterable[Decision],
    weights: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What a block returns with other values of some weights, to which gradients flow; eager.

    Args:
        block: any module; it is not changed.
        entries: weights of the block.
        weights: the values by the names of these, after the input steps that were chosen for them.
        args: of the call.
        kwargs: of the call.
    """
    names = {id(module): f"{name}." if name else "" for name, module in block.named_modules()}
    values = {
        f"{names[id(owner.module)]}{owner.name}": unstepped_weight(entry, weights[entry.fqn])
        for entry in entries
        if entry.fqn in weights
        for owner in entry.owners
        if id(owner.module) in names
    }
    with fast_dense():
        return functional_call(block, values, args, kwargs)

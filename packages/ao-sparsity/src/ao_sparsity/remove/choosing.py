"""Which channels go: those that masks or indices name, or those of the smallest norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ao_core.ext import ConfigError, UnknownNameError, checked
from ao_core.ext.graph import Axis, Inputs, names_of, tensors_of
from ao_sparsity.remove.groups import ChannelGroup, Site, groups_of
from ao_sparsity.remove.tracing import trace_for_removal

__all__ = ["Channels", "Kept", "Wanted", "chosen", "ln_structured", "parsed"]

#: parameter, or parameter and dimension -> a boolean mask of its shape (False goes), or indices that go
Channels: TypeAlias = Mapping[str | Site, Tensor | Sequence[int]]


@dataclass(frozen=True)
class Wanted:
    """What is asked to go of one dimension of a parameter."""

    site: Site
    #: True for the indices that go
    indices: Tensor
    #: indices were given, not a mask
    explicit: bool


@dataclass(frozen=True)
class Kept:
    """Indices that were asked to go and stay."""

    fqn: str
    dim: int
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} indices of {self.fqn}, dimension {self.dim}: {self.reason}"


@checked
def ln_structured(
    model: nn.Module,
    example_inputs: Inputs,
    sparsity: float = 0.5,
    order: float = 2.0,
    *,
    multiple_of: int = 1,
    filter_fn: Callable[[ChannelGroup], bool] | None = None,
) -> dict[Site, list[int]]:
    """The channels of least norm of every group, for `remove_channels`.

    The score of a channel is the L`order` norm, in float64, of all that goes with it: its rows, its
    columns, and its elements of biases and norms.

    Args:
        model: any module that `torch.export` can trace.
        example_inputs: a tuple of positional arguments, a mapping of named ones, or one tensor.
        sparsity: the share of channels of each group that goes, rounded to the nearest number.
        order: of the norm: 1, 2, `math.inf`, …
        multiple_of: the number that stays is rounded up to a multiple, where the group has so many.
        filter_fn: which groups; without it, all that can go without changing the values of what stays,
            whole heads rather than features inside of them.

    Raises:
        ConfigError: a share or order that cannot be, or a weight with NaN or inf.
        RemovalError: the model cannot be exported with these inputs.
    """
    if not 0 <= sparsity < 1:
        raise ConfigError(f"sparsity={sparsity}: need a share from 0 to below 1")
    if not order > 0:
        raise ConfigError(f"order={order}: need a norm of an order above 0")
    if multiple_of < 1:
        raise ConfigError(f"multiple_of={multiple_of}: need a number of at least 1")
    tensors = tensors_of(model)
    found: dict[Site, list[int]] = {}
    for group in groups_of(trace_for_removal(model, example_inputs)).values():
        asked = not (group.inner or group.inexact) if filter_fn is None else filter_fn(group)
        if group.reason is not None or not asked:
            continue
        stay = -(-(group.size - round(sparsity * group.size)) // multiple_of) * multiple_of
        count = group.size - min(max(stay, 1), group.size)
        if count:
            least = _scores(group, tensors, order).argsort(stable=True)[:count]
            for site, indices in group.select(least.tolist()).items():
                found[site] = sorted({*found.get(site, ()), *indices})
    return found


def _scores(group: ChannelGroup, tensors: Mapping[str, Tensor], order: float) -> Tensor:
    total = torch.zeros(group.size, dtype=torch.float64)
    for (name, dim), occurrences in group.channels.items():
        tensor = tensors[name].detach()
        if not tensor.is_floating_point():
            continue
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} has NaN or inf, so its channels have no norm")
        if not isinstance(tensors[name], nn.Parameter):
            continue  # what a norm has seen says nothing of the weights
        flat = tensor.movedim(dim, 0).flatten(1) if tensor.ndim > 1 else tensor[:, None]
        norms = torch.linalg.vector_norm(flat, ord=order, dim=1, dtype=torch.float64).cpu()
        for index in occurrences:
            here = index >= 0
            if order == float("inf"):
                total.scatter_reduce_(0, index[here], norms[here], "amax")
            else:
                total.index_add_(0, index[here], norms[here] ** order)
    return total


def parsed(model: nn.Module, channels: Channels) -> list[Wanted]:
    """Masks and indices by dimension, checked.

    Raises:
        UnknownNameError: the model has no parameter of a name.
        ConfigError: a mask of another shape, or an index that a dimension does not have.
    """
    first, tensors = names_of(model), tensors_of(model)
    found: list[Wanted] = []
    for key, value in channels.items():
        fqn, dim = (key, None) if isinstance(key, str) else key
        if fqn not in first:
            raise UnknownNameError("parameter", fqn, first)
        shape = tensors[first[fqn]].shape
        if dim is not None and not 0 <= dim < len(shape):
            raise ConfigError(f"{fqn!r} has no dimension {dim}: its shape is {tuple(shape)}")
        if isinstance(value, Tensor) and value.dtype == torch.bool:
            if value.shape != shape or dim is not None:
                raise ConfigError(
                    f"the mask of {fqn!r} has the shape {tuple(value.shape)} (dimension: {dim}): "
                    f"need {tuple(shape)}, under the name alone"
                )
            for i in range(len(shape)):
                others = [j for j in range(len(shape)) if j != i]
                kept = value.any(dim=others) if others else value
                found.append(Wanted((first[fqn], i), ~kept.cpu(), explicit=False))
        else:
            size = shape[dim or 0] if shape else 0
            found.append(Wanted((first[fqn], dim or 0), _indices(fqn, value, size), explicit=True))
    return found


def _indices(fqn: str, value: Tensor | Sequence[int], size: int) -> Tensor:
    indices = torch.as_tensor(value, device="cpu")
    if indices.numel() == 0:
        indices = indices.to(torch.int64)
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ConfigError(f"{fqn!r}: need a boolean mask or whole numbers, found {indices.dtype}")
    if indices.ndim != 1 or not ((indices >= 0) & (indices < size)).all():
        raise ConfigError(f"{fqn!r}: need a list of indices from 0 to {size - 1}, found {value}")
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, indices.to(torch.int64), True)


def chosen(
    groups: Mapping[Axis, ChannelGroup], wanted: Sequence[Wanted], *, exact: bool
) -> tuple[dict[Axis, Tensor], list[Kept]]:
    """True for the channels of each atom that go, and what was asked for beyond them.

    Raises:
        ConfigError: nothing would be left of a group.
    """
    asked = {atom: _asked(group, wanted) for atom, group in groups.items()}
    gone: dict[Axis, Tensor] = {}
    for atom, group in groups.items():
        free = group.reason is None and not (exact and group.inexact)
        if free and asked[atom].any():
            if asked[atom].all():
                raise ConfigError(
                    f"all {group.size} channels of {group.name} would go: at least one has to stay"
                )
            gone[atom] = asked[atom]
    kept = []
    for entry in wanted:
        here = [(atom, group) for atom, group in groups.items() if entry.site in group.channels]
        left = entry.indices.clone()
        for atom, group in here:
            if atom in gone:
                left &= ~group.indices(entry.site, gone[atom])
        if left.any():
            held = [
                (atom, group)
                for atom, group in here
                if any((index[left] >= 0).any() for index in group.channels[entry.site])
            ]
            kept.append(Kept(*entry.site, int(left.sum()), _why(held, asked, exact=exact)))
    return gone, kept


def _asked(group: ChannelGroup, wanted: Sequence[Wanted]) -> Tensor:
    """True for the channels that indices name, or all masks of writers, or those of all readers."""
    explicit = torch.zeros(group.size, dtype=torch.bool)
    writers: list[Tensor] = []
    readers: dict[Site, Tensor] = {}
    for entry in wanted:
        if entry.site not in group.channels:
            continue
        # a head is named by all of its rows; a mask has to name it wherever it is
        named = torch.stack(
            [_whole(i, entry.indices, group.size) for i in group.channels[entry.site]]
        )
        if entry.explicit:
            explicit |= named.any(0)
        elif entry.site in group.readers:
            readers[entry.site] = named.all(0)
        else:
            writers.append(named.all(0))
    if writers:
        explicit |= torch.stack(writers).all(0)
    if len(readers) == len(group.readers) > 0:
        explicit |= torch.stack(list(readers.values())).all(0)
    return explicit


def _whole(index: Tensor, named: Tensor, size: int) -> Tensor:
    """True for the channels of which every index is named."""
    here = index >= 0
    count = torch.bincount(index[here], minlength=size)
    return (torch.bincount(index[here & named], minlength=size) == count) & (count > 0)


def _why(
    held: Sequence[tuple[Axis, ChannelGroup]], asked: Mapping[Axis, Tensor], *, exact: bool
) -> str:
    """Why indices stay that were asked to go."""
    for atom, group in held:
        if group.reason is not None and (asked[atom].any() or len(held) == 1):
            return group.reason
        if exact and group.inexact is not None and asked[atom].any():
            return f"{group.inexact}, so what stays would change (exact=False allows it)"
    sizes = " × ".join(str(group.size) for _, group in held)
    if len(held) > 1:
        return f"they are parts of {sizes} channels, of which none is named as a whole"
    return "masks of other parameters of the group keep these channels, or are not given"

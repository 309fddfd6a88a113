"""Cutting channels out of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ao_core.ext import ConfigError, checked_but, shown
from ao_core.ext.graph import Axis, Inputs, Traced, copied, sharing, tensors_of
from ao_sparsity.remove.checking import difference, unread
from ao_sparsity.remove.choosing import Channels, Kept, chosen, parsed
from ao_sparsity.remove.errors import RemovalError
from ao_sparsity.remove.fitting import Fit, fit
from ao_sparsity.remove.groups import ChannelGroup, groups_of
from ao_sparsity.remove.report import RemovalReport, Removed
from ao_sparsity.remove.sizes import Attribute, is_layer, set_attributes, stays
from ao_sparsity.remove.tracing import trace_for_removal

__all__ = ["remove_channels"]

M = TypeVar("M", bound=nn.Module)


@checked_but("channels")
def remove_channels(
    model: M,
    example_inputs: Inputs,
    channels: Channels,
    *,
    exact: bool = True,
    strict: bool = False,
    inplace: bool = False,
) -> tuple[M, RemovalReport]:
    """Cut channels, heads or features out of all layers that they connect; gives a smaller plain model.

    What is removed is no longer *read*: the smaller model computes what the dense one computes when the
    columns of all weights that read the removed channels are zero. That is checked with the example inputs.
    Parameters keep dtype, device, `requires_grad` and what they are tied to. They are other objects than
    before, so an optimizer has to be made anew.

    Args:
        model: any module that `torch.export` can trace. It is traced and checked in evaluation mode.
        example_inputs: a tuple of positional arguments, a mapping of named ones, or one tensor.
        channels: for names of parameters, either boolean masks of their shapes, in which what goes is False
            as whole rows or columns, or indices of rows; for (name, dimension) indices of that dimension.
            A channel goes when indices name it, when all masks of weights that write it let it go, or when
            the masks of all weights that read it do.
        exact: False lets channels go over which a norm, softmax or mean is taken, so that what stays has
            other values; the report then has the difference, which is not bounded.
        strict: raise where something stays that was asked to go.
        inplace: change the model itself, after everything was checked; it is what is returned.

    Returns:
        The smaller model, in the mode (training or evaluation) of `model`, and the report.

    Raises:
        UnknownNameError: the model has no parameter of a name.
        ConfigError: masks of other shapes, indices out of range, nothing would be left of a group, or
            with `strict` something stays.
        RemovalError: the model cannot be exported or copied, or the outputs are not equal. In any case
            the model is as it was.
    """
    if not isinstance(channels, Mapping):
        raise ConfigError(
            f"channels={shown(channels)}: give masks or indices by names of parameters"
        )
    wanted = parsed(model, channels)
    if any(tensor.is_meta for tensor in tensors_of(model).values()):
        raise ConfigError("the model is on the meta device: load its weights first")
    traced = trace_for_removal(model, example_inputs)
    groups = groups_of(traced)
    gone, kept = chosen(groups, wanted, exact=exact)
    found = fit(model, example_inputs, traced, groups, gone)
    kept += [_refused(groups[atom], gone[atom], reason) for atom, reason in found.refused.items()]
    if strict and kept:
        raise ConfigError("; ".join(map(str, kept)))
    smaller = _cut(model, traced, found)
    error = _checked(model, smaller, example_inputs, groups, found.gone, exact=exact)
    report = _report(model, smaller, groups, found, kept, error)
    if inplace:
        _move(smaller, model, found)
        return model, report
    return smaller, report


def _refused(group: ChannelGroup, gone: Tensor, reason: str) -> Kept:
    count = int(group.indices(group.site, gone).sum())
    return Kept(*group.site, count, f"the code fixes their number ({reason})")


def _cut(model: M, traced: Traced, found: Fit) -> M:
    """A copy without what goes; nothing of it is shared with the model."""
    others: dict[str, Tensor] = {}
    for name, tensor in tensors_of(model).items():
        cut = tensor.detach()
        for dim, axis in enumerate(traced.tensors[name]):
            stay = stays(axis, found.gone)
            if not stay.all():
                cut = cut.index_select(dim, stay.nonzero().flatten().to(cut.device))
        if cut.shape != tensor.shape:
            is_parameter = isinstance(tensor, nn.Parameter)
            others[name] = nn.Parameter(cut, tensor.requires_grad) if is_parameter else cut
    smaller: M = copied(model, others)  # type: ignore[assignment]
    set_attributes(smaller, found.attributes)
    return smaller


def _checked(
    model: nn.Module,
    smaller: nn.Module,
    inputs: Inputs,
    groups: Mapping[Axis, ChannelGroup],
    gone: Mapping[Axis, Tensor],
    *,
    exact: bool,
) -> float:
    dense = sharing(model, unread(model, groups, gone))
    error, bound = difference(dense, smaller, inputs)
    if exact and not error <= bound:
        raise RemovalError(
            f"the smaller model is not equal: its outputs differ by {error:.2g} of their norm from those "
            f"of the dense model that does not read what was removed, and rounding explains {bound} only. "
            "Does its code use a number of channels, or random numbers?"
        )
    return error


def _report(
    model: nn.Module,
    smaller: nn.Module,
    groups: Mapping[Axis, ChannelGroup],
    found: Fit,
    kept: list[Kept],
    error: float,
) -> RemovalReport:
    removed = tuple(
        Removed(
            groups[atom].name,
            groups[atom].size,
            tuple(away.nonzero().flatten().tolist()),
            groups[atom].writers,
            groups[atom].readers,
        )
        for atom, away in found.gone.items()
    )
    old, new = (list(m.parameters()) for m in (model, smaller))
    changed = {key: (_value(model, key), new) for key, new in found.attributes.items()}
    attributes = {
        key: pair for key, pair in changed.items() if not is_layer(model.get_submodule(key[0]))
    }
    return RemovalReport(
        removed,
        tuple(kept),
        {".".join(filter(None, key)): pair for key, pair in attributes.items()},
        {".".join(filter(None, key)): _value(model, key) for key in found.left},
        (sum(p.numel() for p in old), sum(p.numel() for p in new)),
        (sum(p.nbytes for p in old), sum(p.nbytes for p in new)),
        error,
    )


def _value(model: nn.Module, key: Attribute) -> Any:
    return getattr(model.get_submodule(key[0]), key[1])


def _move(smaller: nn.Module, model: nn.Module, found: Fit) -> None:
    """Give a model the tensors and attributes of its smaller copy where they differ."""
    for (_, old), (_, new) in zip(model.named_modules(), smaller.named_modules(), strict=True):
        for mine, other in ((old._parameters, new._parameters), (old._buffers, new._buffers)):
            for name, tensor in mine.items():
                cut = other[name]
                if tensor is not None and cut is not None and tensor.shape != cut.shape:
                    mine[name] = cut
    set_attributes(model, found.attributes)

"""Sizes that the code of a model holds: does it run with fewer channels, and with which attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ao_core.ext.graph import Axis, Inputs, Traced
from ao_sparsity.remove.errors import RemovalError
from ao_sparsity.remove.groups import ChannelGroup
from ao_sparsity.remove.sizes import Attribute, Attributes, Smaller, Wrong, kind

__all__ = ["Fit", "fit"]

#: how often a model is traced, at most, to find the attributes that have to change
_TRIALS = 40


@dataclass(frozen=True)
class Fit:
    """What goes, the attributes that change, and the groups that the code does not let go."""

    gone: dict[Axis, Tensor]
    attributes: Attributes
    #: attributes that were an old size and stay
    left: tuple[Attribute, ...]
    refused: dict[Axis, str]


def fit(
    model: nn.Module,
    inputs: Inputs,
    traced: Traced,
    groups: Mapping[Axis, ChannelGroup],
    gone: dict[Axis, Tensor],
) -> Fit:
    """Trace the model with fewer channels; where it does not run as it should, kind by kind.

    Groups are of a kind when their names differ in numbers only, as those of the layers of a stack.

    Raises:
        RemovalError: kinds that can go alone cannot go together.
    """
    refused: dict[Axis, str] = {}
    found = _solve(Smaller(model, inputs, traced, gone), {})
    if isinstance(found, Wrong):
        together: Attributes = {}
        for part in _kinds(groups, gone):
            if len(part) < len(gone):
                found = _solve(Smaller(model, inputs, traced, part), {})
            if isinstance(found, Wrong):
                where = f" in {found.owner!r}" if found.owner else ""
                refused.update(dict.fromkeys(part, found.text + where))
            else:
                together.update(found)
        gone = {atom: away for atom, away in gone.items() if atom not in refused}
        found = _solve(Smaller(model, inputs, traced, gone), together)
    if isinstance(found, Wrong):
        raise RemovalError(
            f"the model does not run with fewer channels: {found.text} in {found.owner!r}"
        )
    options = Smaller(model, inputs, traced, gone).options().values()
    left = dict.fromkeys(key for option in options for key in option if key not in found)
    return Fit(gone, found, tuple(left), refused)


def _kinds(
    groups: Mapping[Axis, ChannelGroup], gone: Mapping[Axis, Tensor]
) -> list[dict[Axis, Tensor]]:
    """Groups that differ in the numbers of their names only go together."""
    found: dict[tuple[str, int], dict[Axis, Tensor]] = {}
    for atom, away in gone.items():
        found.setdefault((kind(groups[atom].name), atom.size), {})[atom] = away
    return list(found.values())


def _solve(smaller: Smaller, start: Attributes) -> Attributes | Wrong:
    """The attributes with which all goes as it should, or what is wrong without them.

    Where something is wrong, attributes are tried one after the other, in all modules of a kind, those of
    the module where it is and of the ones around it first. What makes no difference is not changed: the
    number of a layer may by chance be a number of heads.
    """
    options = smaller.options()
    trials = iter(range(_TRIALS))

    def search(attributes: Attributes, wrong: Wrong) -> Attributes | None:
        where = kind(wrong.owner) + "."
        for _, option in sorted(options.items(), key=lambda item: not where.startswith(item[0][0])):
            if option.keys() & attributes.keys():
                continue
            if next(trials, None) is None:
                return None
            trial = attributes | option
            now = smaller.wrong(trial)
            found = trial if now is None else None if now == wrong else search(trial, now)
            if found is not None:
                return found
        return None

    first = smaller.declared() | start
    wrong = smaller.wrong(first)
    return first if wrong is None else search(first, wrong) or wrong

"""Sizes that the code of a model holds: does it run with fewer channels, and with which attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice

from torch import Tensor, nn

from ao_sparsity.remove.axes import Axis
from ao_sparsity.remove.errors import RemovalError
from ao_sparsity.remove.groups import ChannelGroup
from ao_sparsity.remove.sizes import Attribute, Attributes, Smaller
from ao_sparsity.remove.tracing import Inputs, Traced

__all__ = ["Fit", "fit"]

#: how often a model is traced, at most, to find the attributes that have to change
_TRIALS = 48


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
    attributes, reason = _solve(Smaller(model, inputs, traced, gone))
    if attributes is None:
        kinds: dict[tuple[str, int], dict[Axis, Tensor]] = {}
        for atom, away in gone.items():
            kind = re.sub(r"\d+", "#", groups[atom].name), atom.size
            kinds.setdefault(kind, {})[atom] = away
        for part in kinds.values():
            found = None
            if len(kinds) > 1:
                found, reason = _solve(Smaller(model, inputs, traced, part))
            if found is None:
                refused.update(dict.fromkeys(part, reason))
        gone = {atom: away for atom, away in gone.items() if atom not in refused}
        attributes, reason = _solve(Smaller(model, inputs, traced, gone))
    if attributes is None:
        raise RemovalError(f"the model does not run with fewer channels: {reason}")
    options = Smaller(model, inputs, traced, gone).options().values()
    left = dict.fromkeys(key for found in options for key in found if key not in attributes)
    return Fit(gone, attributes, tuple(left), refused)


def _solve(smaller: Smaller) -> tuple[Attributes | None, str]:
    """The attributes with which all sizes are as they should be, or None and what is wrong without."""
    first = ""
    for attributes in islice(_trials(smaller), _TRIALS):
        wrong = smaller.wrong(attributes)
        if wrong is None:
            return attributes, ""
        first = first or wrong
    return None, first


def _trials(smaller: Smaller) -> Iterator[Attributes]:
    """Those that layers declare; then also one, two, … of those that have an old size.

    Modules of a class change together. What is not needed is not changed: the number of a layer may by
    chance be a number of heads.
    """
    declared = smaller.declared()
    options = smaller.options()
    for count in range(len(options) + 1):
        for keys in combinations(options, count):
            if len({key[:2] for key in keys}) == count:
                yield {
                    k: v
                    for found in (declared, *(options[key] for key in keys))
                    for k, v in found.items()
                }

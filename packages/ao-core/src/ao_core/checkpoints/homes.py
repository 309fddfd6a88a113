"""Where the files have a parameter of the model: as one tensor, or as several that are joined on loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.folder_records import Place
from ao_core.targets import Decision
from ao_core.tensor import QTensor, repack
from ao_core.tensor.saving import Entry

__all__ = ["Home", "Step", "crossing_reason", "joined"]


@dataclass(frozen=True)
class Step:
    """A tensor of the source, tied ones once."""

    #: the first of its names in natural order, under which it is written
    fqn: str
    #: its other names
    tied: tuple[str, ...]
    #: what the source has
    entry: Entry
    #: of a dense float; its configuration is None where it is kept
    plan: Decision | None
    #: why it is kept; empty where it is to be quantized
    reason: str
    #: where it lies in the parameter that it is joined into; empty: it is the parameter, or that is not known
    place: Place = ()

    @property
    def wanted(self) -> bool:
        """Whether it is to be quantized."""
        return self.plan is not None and self.plan.config is not None

    def of(self, parameter: Tensor) -> Tensor:
        """What this tensor has of the values of the parameter.

        Raises:
            UnsupportedOp: they are quantized, in blocks that cross its border.
        """
        return parameter[self.place] if self.place else parameter


@dataclass(frozen=True)
class Home:
    """The tensors of the files that a parameter is joined of; mostly one."""

    parts: tuple[Step, ...]
    #: of the parameter
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the files call it, or the first of its parts."""
        return self.parts[0].fqn

    @property
    def dtype(self) -> torch.dtype:
        """In the files."""
        return self.parts[0].entry.dtype

    @property
    def nbytes(self) -> int:
        """In the files."""
        return sum(part.entry.nbytes for part in self.parts)

    def is_in(self, names: Collection[str]) -> bool:
        """Whether all parts are among these tensors."""
        return all(part.fqn in names for part in self.parts)


def joined(home: Home, value: Callable[[Step], Tensor]) -> Tensor:
    """A parameter from the values of the tensors that the files have of it, dense or all of one format."""
    first = value(home.parts[0])
    if len(home.parts) == 1:
        return first
    if isinstance(first, QTensor):
        rest = [(part.place, value(part)) for part in home.parts[1:]]
        made = _assembled([(home.parts[0].place, first), *rest])
        return repack(made) if isinstance(made, QTensor) else made
    whole = torch.empty(home.shape, dtype=first.dtype)
    for part in home.parts:  # one at a time: they may take as much as the rest of a block
        whole[part.place] = first if part is home.parts[0] else value(part)
    return whole


def crossing_reason(step: Step, parameter: Tensor) -> str | None:
    """Why what became of a parameter cannot be stored as the tensors of the files; None where it can."""
    if not step.place:
        return None
    *before, last = step.place
    try:
        step.of(parameter)
        if isinstance(last, slice) and last.stop < parameter.shape[len(before)]:
            parameter[(*before, slice(last.stop, None))]  # what follows begins with a block, too
    except UnsupportedOp as error:
        assert step.plan is not None
        return f"it is joined into {step.plan.fqn}, whose blocks cross its border ({error})"
    return None


def _assembled(pieces: Sequence[tuple[Place, Tensor]], dim: int = 0) -> Tensor:
    """The tensor that has each of these at its place: stacked by numbers, and put in a row by slices.

    `dim` is the dimension that the first slice is of.
    """
    if not pieces[0][0]:
        return pieces[0][1]
    is_number = isinstance(pieces[0][0][0], int)
    along: dict[int, list[tuple[Place, Tensor]]] = {}
    for (first, *rest), value in pieces:
        along.setdefault(_start(first), []).append((tuple(rest), value))
    inner = dim if is_number else dim + 1
    made = [_assembled(along[start], inner) for start in sorted(along)]
    return torch.stack(made) if is_number else torch.cat(made, dim)


def _start(index: int | slice) -> int:
    return index if isinstance(index, int) else int(index.start)

"""Where the weights of a model are while it is visited: all in memory, or brought there block by block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from torch import Tensor, nn

from ao_core.calibration.observing import Note
from ao_core.calibration.samples import Replacement, replaced
from ao_core.targets import Decision

__all__ = ["InMemory", "Weights"]


class Weights(Protocol):
    """What a visit asks of whoever has the weights."""

    def around(self) -> AbstractContextManager[None]:
        """Within this context the weights in no block are there, and those of a block while it runs."""
        ...

    def watching(self, entries: Sequence[Decision], note: Note) -> AbstractContextManager[None]:
        """Within this context `note` is called for those weights that are brought while the model runs."""
        ...

    def begin(self, reason: str, activation_bytes: int) -> None:
        """It is known how the weights are visited, and how much memory the inputs of a block take."""
        ...

    def inside(self, block: nn.Module) -> AbstractContextManager[None]:
        """Within this context the weights of a block are there; afterwards it is not run again."""
        ...

    def put(self, entry: Decision, new: Tensor) -> None:
        """A rewritten weight takes the place of the old one, until the visit ends."""
        ...

    def as_it_was(self, entries: Sequence[Decision] | None = None) -> AbstractContextManager[None]:
        """Within this context these weights, or all, are those that were there before any was rewritten."""
        ...


class InMemory:
    """All weights of the model, which has its own again when `stack` is closed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._before: dict[str, Replacement] = {}

    def around(self) -> AbstractContextManager[None]:
        """Nothing is to be done."""
        return nullcontext()

    def watching(self, entries: Sequence[Decision], note: Note) -> AbstractContextManager[None]:
        """Nothing is to be done."""
        return nullcontext()

    def begin(self, reason: str, activation_bytes: int) -> None:
        """Nothing is to be done."""

    def inside(self, block: nn.Module) -> AbstractContextManager[None]:
        """Nothing is to be done."""
        return nullcontext()

    def put(self, entry: Decision, new: Tensor) -> None:
        """Replace the weight."""
        self._before[entry.fqn] = entry.owners, entry.tensor
        self._stack.enter_context(replaced([(entry.owners, new)]))

    def as_it_was(self, entries: Sequence[Decision] | None = None) -> AbstractContextManager[None]:
        """Put the old weights back for that time."""
        names = self._before.keys() if entries is None else {entry.fqn for entry in entries}
        return replaced([before for name, before in self._before.items() if name in names])

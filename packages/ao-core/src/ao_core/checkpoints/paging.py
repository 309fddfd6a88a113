"""The weights of a model larger than memory, brought from files block by block while it is visited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ao_core.calibration.inputs import operands
from ao_core.calibration.needing import algorithm_of
from ao_core.calibration.observing import Note, observing
from ao_core.checkpoints.calibration import unit_names
from ao_core.checkpoints.homes import joined
from ao_core.checkpoints.job import Calibration
from ao_core.quantize import Converted, convert
from ao_core.targets import Decision
from ao_core.tensor.saving import Checkpoint, open_checkpoint

__all__ = ["Done", "Paged"]


@dataclass
class Paged:
    """`Weights` of a model on the meta device."""

    calibration: Calibration
    checkpoint: Checkpoint
    #: by the name of a decision, what became of it and is in no piece yet
    ready: dict[str, Converted]
    #: by the name of a tensor in the files, the piece that has what became of it
    there: dict[str, Path]
    #: whether rewritten weights make the inputs of those after them
    sequential: bool
    #: called when a block is done
    flush: Callable[[], None]
    #: how the weights are visited; empty while that is found, with weights as they were
    reason: str = ""
    _blank: dict[str, Tensor] = field(default_factory=dict)
    #: names of weights that are asked for as they were before any was rewritten
    _original: frozenset[str] = frozenset()
    _watched: tuple[Sequence[Decision], Note] | None = None

    def __post_init__(self) -> None:
        calibration = self.calibration
        self._blank = {entry.fqn: entry.tensor for entry in calibration.decisions}
        self._units = [calibration.model.get_submodule(n) for n in unit_names(calibration.model)]
        inside = {id(module) for unit in self._units for module in unit.modules()}
        self._outside = [
            entry
            for entry in calibration.decisions
            if not all(id(owner.module) in inside for owner in entry.owners)
        ]
        calibration.fill_buffers()
        for name, tensor in calibration.buffers.items():
            owner, _, own = name.rpartition(".")
            module = calibration.model.get_submodule(owner)
            module._buffers[own] = self.checkpoint.read(tensor)

    def begin(self, reason: str, activation_bytes: int) -> None:
        """Take note of how the weights are visited."""
        self.reason = f"blocks ({reason})"

    @contextmanager
    def around(self) -> Iterator[None]:
        """Weights outside of units are there, and those of a unit while it is called."""
        with ExitStack() as stack:
            stack.enter_context(self._loaded(self._outside))
            for unit in self._units:
                entries = self._entries_of(unit)
                if not entries:
                    continue
                calls: list[ExitStack] = []

                def before(
                    module: nn.Module,
                    args: Any,
                    entries: Sequence[Decision] = entries,
                    calls: list[ExitStack] = calls,
                ) -> None:
                    calls.append(call := ExitStack())
                    call.enter_context(self._loaded(entries))
                    if self._watched is not None:
                        names = {entry.fqn for entry in self._watched[0]}
                        seen = [entry for entry in entries if entry.fqn in names]
                        call.enter_context(observing(operands(seen), self._watched[1]))

                def after(
                    module: nn.Module, args: Any, out: Any, calls: list[ExitStack] = calls
                ) -> None:
                    calls.pop().close()

                stack.callback(unit.register_forward_pre_hook(before).remove)
                stack.callback(unit.register_forward_hook(after, always_call=True).remove)
            yield

    @contextmanager
    def watching(self, entries: Sequence[Decision], note: Note) -> Iterator[None]:
        """Units that are called have those of the weights that are theirs observed."""
        before, self._watched = self._watched, (entries, note)
        try:
            yield
        finally:
            self._watched = before

    @contextmanager
    def inside(self, block: nn.Module) -> Iterator[None]:
        """The weights of a block are there; afterwards what became of them may be written."""
        with self._loaded(self._entries_of(block)):
            yield
        self.flush()

    def put(self, entry: Decision, new: Tensor) -> None:
        """A rewritten weight is in its place, unless inputs are to be those of the model as it was."""
        if self.sequential:
            _set(entry, new)

    @contextmanager
    def as_it_was(self, entries: Sequence[Decision] | None = None) -> Iterator[None]:
        """Weights that are in memory, or are brought there, are those of the files."""
        before = self._original
        asked = self.calibration.decisions if entries is None else entries
        self._original = before | {entry.fqn for entry in asked}
        changed = [
            (entry, entry.tensor)
            for entry in asked
            if not entry.tensor.is_meta and self._is_rewritten(entry)
        ]
        try:
            for entry, _ in changed:
                _set(entry, self._value(entry))
            yield
        finally:
            self._original = before
            for entry, tensor in changed:
                _set(entry, tensor)

    def _is_rewritten(self, entry: Decision) -> bool:
        is_there = self.calibration.homes[entry.fqn].is_in(self.there)
        return self.sequential and (is_there or entry.fqn in self.ready)

    def _entries_of(self, module: nn.Module) -> list[Decision]:
        inside, outside = {id(each) for each in module.modules()}, {id(e) for e in self._outside}
        return [
            entry
            for entry in self.calibration.decisions
            if id(entry) not in outside and id(entry.owners[0].module) in inside
        ]

    @contextmanager
    def _loaded(self, entries: Sequence[Decision]) -> Iterator[None]:
        """These weights are in memory, unless they were before."""
        blank = [entry for entry in entries if entry.tensor.is_meta]
        try:
            for entry in blank:
                _set(entry, self._value(entry))
            yield
        finally:
            for entry in blank:
                _set(entry, self._blank[entry.fqn])

    def _value(self, entry: Decision) -> Tensor:
        """A weight as it is by now."""
        home = self.calibration.homes[entry.fqn]
        if self.sequential and self.reason and entry.fqn not in self._original:
            done = self.ready.get(entry.fqn)
            if done is not None and done[0] is not None:
                return done[0]
            if home.is_in(self.there):
                return joined(home, lambda s: open_checkpoint(self.there[s.fqn]).load(s.fqn))
        dense = joined(home, lambda step: self.checkpoint.load(step.entry.fqn))
        needs_data = algorithm_of(entry.config) is not None
        # formats that need no data are there from the start
        if self.sequential and entry.config is not None and not needs_data:
            new = convert(entry, dense)[0]
            return dense if new is None else new
        return dense


class Done(Mapping[str, Tensor]):
    """The weights that are in a piece: by their names, what the model has in their places."""

    def __init__(self, entries: Mapping[str, Decision]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name].tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _set(entry: Decision, value: Tensor) -> None:
    parameter = (
        value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    )
    for owner in entry.owners:
        owner.module._parameters[owner.name] = parameter

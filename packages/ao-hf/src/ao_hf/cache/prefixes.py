"""Passes of a model that begin at a block: those before it return what they returned before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["Prefix", "Recorded", "blocks_of", "recorded"]


@dataclass(frozen=True)
class Prefix:
    """What the blocks of a model return for one input."""

    blocks: tuple[nn.Module, ...]
    outputs: tuple[Any, ...]

    @contextmanager
    def skipped(self, block: int) -> Iterator[None]:
        """A time in which the blocks before one compute nothing."""
        skipped = self.blocks[:block]
        try:
            for module, output in zip(skipped, self.outputs, strict=False):
                module.forward = partial(_returned, output)
            yield
        finally:
            for module in skipped:
                vars(module).pop("forward", None)


@dataclass
class Recorded:
    """What blocks were called with and what they returned, in the order of the calls."""

    blocks: tuple[nn.Module, ...]
    calls: list[tuple[nn.Module, Any, Any]] = field(default_factory=list)

    def prefix(self) -> Prefix | None:
        """What they returned, if each was called once with what the one before returned, and nothing else."""
        if not self.blocks or [module for module, _, _ in self.calls] != list(self.blocks):
            return None
        outputs = [output for _, _, output in self.calls]
        follows = zip(outputs, self.calls[1:], strict=False)
        if not all(isinstance(x, Tensor) and x is given for x, (_, given, _) in follows):
            return None
        return Prefix(self.blocks, tuple(outputs))


@contextmanager
def recorded(blocks: Sequence[nn.Module]) -> Iterator[Recorded]:
    """A time in which it is noted what blocks return; no blocks: nothing is."""
    found = Recorded(tuple(blocks))

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        found.calls.append((module, given, output))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in found.blocks]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def blocks_of(model: nn.Module, count: int) -> tuple[nn.Module, ...]:
    """The blocks of a decoder with so many layers; none where they cannot be told or were changed."""
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == count]
    if len(lists) != 1 or any("forward" in vars(module) for module in lists[0]):
        return ()
    return tuple(lists[0])


def _returned(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output

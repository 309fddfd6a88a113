"""What `ao_hf.fuse` did."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["FuseReport", "Fused", "Kept"]


@dataclass(frozen=True)
class Fused:
    """A module whose forward is fused."""

    name: str
    #: what runs as one op each: "norm + q/k/v + rotary embedding", …
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """A module, or a part of one, that runs as it did, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class FuseReport:
    """Which modules were fused, and which were not and why. `str` of it is a table.

    As a context manager it undoes the fusion at its end.
    """

    #: that `fuse` was called with
    model: Any
    #: in the order of the model
    fused: tuple[Fused, ...]
    #: the same
    kept: tuple[Kept, ...]
    #: of blocks that are one op together, for a few tokens over an `AoCache`: name of the first one, how many
    runs: tuple[tuple[str, int], ...] = ()
    #: the module that calls the blocks; None where no block is fused
    around: Fused | Kept | None = None
    #: the model, where it makes logits of what that module returns; None where it was not looked at
    logits: Fused | Kept | None = None
    #: the cache of `generate` where none is asked for; None where no block is fused
    cache: Fused | Kept | None = None

    def unfuse(self) -> None:
        """Let the model run as before. Twice is as good as once."""
        from ao_hf.fusing.apply import unfuse

        unfuse(self.model)

    def __enter__(self) -> FuseReport:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unfuse()

    def __str__(self) -> str:
        around = [one for one in (self.around, self.logits, self.cache) if one is not None]
        found: list[Fused | Kept] = [*self.fused, *self.kept, *around]
        lines = [
            f"{name}  {text}" for name, text in _alike((one.name, _text(one)) for one in found)
        ]
        lines += [
            f"{name} and the next {count - 1}: one op for a few tokens, over an AoCache with the attention "
            "'ao_kv', and for one token over an exact AoCache with 'sdpa'"
            for name, count in self.runs
        ]
        return "\n".join(lines)


def _text(one: Fused | Kept) -> str:
    return "; ".join(one.ops) if isinstance(one, Fused) else f"not fused: {one.reason}"


def _alike(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """One row for all modules of which the same is to be said, with the numbers left out of their names."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, text in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|:|$)", "*", name)
        found.setdefault((pattern, text), []).append(name)
    names = [
        group[0] if len(group) == 1 else f"{pattern} ({len(group)})"
        for (pattern, _), group in found.items()
    ]
    width = max(map(len, names), default=0)
    texts = (text for _, text in found)
    return [(name.ljust(width), text) for name, text in zip(names, texts, strict=True)]

"""Two checkpoints, tensor by tensor: formats, bytes, and which is nearer to the original."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from torch import Tensor

from ao_core import QTensor
from ao_core.ext import CheckpointError, checked
from ao_core.ext.quantizing import Progress, watched
from ao_core.ext.saving import natural
from ao_quant.interchange.sources import Opened, open_foreign
from ao_quant.interchange.verdicts import compare, same_bytes

__all__ = ["Difference", "Differences", "diff_checkpoints"]

_NONE = "none"


@dataclass(frozen=True)
class Difference:
    """One tensor in both."""

    name: str
    #: its format in each, the dtype where it is dense; "none" where it is not there
    first: str
    second: str
    #: whether it is stored as the same bytes
    same_bytes: bool
    #: greatest difference of a value
    max_error: float = 0.0
    #: of the second around the first, in decibels; None: values are equal, or one is missing
    sqnr: float | None = None
    #: of each around the original; None: values are equal to it, or there is none
    sqnr_first: float | None = None
    sqnr_second: float | None = None
    #: "first", "second", "both" where they are equally near; empty: there is no original
    nearer: str = ""

    @property
    def equal(self) -> bool:
        """Whether it has the same values in both."""
        return _NONE not in (self.first, self.second) and self.sqnr is None

    def __str__(self) -> str:
        if _NONE in (self.first, self.second):
            where = "second" if self.first == _NONE else "first"
            return f"{self.name}: only in the {where}"
        formats = self.first if self.first == self.second else f"{self.first} | {self.second}"
        said = "bytes equal" if self.same_bytes else "values equal"
        if not self.equal:
            said = f"max difference {self.max_error:.3g}, {self.sqnr:.1f} dB"
        return f"{self.name}: {said}; {formats}{self._nearness()}"

    def _nearness(self) -> str:
        if not self.nearer:
            return ""
        each = [
            "equal" if found is None else f"{found:.2f} dB"
            for found in (self.sqnr_first, self.sqnr_second)
        ]
        return f"; to the original {' | '.join(each)}: {self.nearer}"


@dataclass(frozen=True)
class Differences:
    """All tensors; `str()` has a line for each that is not the same bytes."""

    tensors: tuple[Difference, ...]

    @property
    def exit_code(self) -> int:
        """0: all values are equal, 1: some are not."""
        return int(not all(each.equal for each in self.tensors))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"tensors": [asdict(each) for each in self.tensors], "equal": self.exit_code == 0}

    def __str__(self) -> str:
        same = sum(each.same_bytes for each in self.tensors)
        equal = sum(each.equal for each in self.tensors) - same
        told = (
            f"{same} bytes equal, {equal} values equal, {len(self.tensors) - same - equal} differ"
        )
        lines = [f"{len(self.tensors)} tensors: {told}"]
        if any(each.nearer for each in self.tensors):
            counts = {
                k: sum(e.nearer == k for e in self.tensors) for k in ("first", "second", "both")
            }
            lines.append(
                "nearer to the original: " + ", ".join(f"{v} {k}" for k, v in counts.items())
            )
        return "\n".join([*lines, *(str(each) for each in self.tensors if not each.same_bytes)])


@checked
def diff_checkpoints(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> Differences:
    """Compare two checkpoints, each of ao or of any known format, one tensor at a time.

    Args:
        first: a folder, an index or a file.
        second: another one.
        original: the checkpoint that both were made of, to tell which is nearer to it.
        progress: True shows a bar, a function is called as (done, total, name of the next tensor).

    Raises:
        CheckpointError: one cannot be read, or a tensor has other shapes in them.
    """
    opened = [open_foreign(path) for path in (first, second)]
    dense = None if original is None else open_foreign(original)
    names = sorted({name for each in opened for name in _names(each)}, key=natural)
    found = watched(names, names, progress, "compare")
    return Differences(tuple(_differences(opened[0], opened[1], dense, found)))


def _names(opened: Opened) -> list[str]:
    return [*opened.reading.weights, *opened.dense]


def _tensor(opened: Opened, name: str) -> QTensor | Tensor | None:
    """A tensor by its name, tied ones by that which they are tied to."""
    name = opened.checkpoint.ties.get(name, name)
    if name in opened.reading.weights:
        return opened.reading.weights[name].make()
    return opened.source.take(name) if name in opened.source.forms else None


def _differences(
    first: Opened, second: Opened, original: Opened | None, names: Iterator[str] | list[str]
) -> Iterator[Difference]:
    for name in names:
        a, b = _tensor(first, name), _tensor(second, name)
        if a is None or b is None:
            yield Difference(name, _form(a), _form(b), same_bytes=False)
            continue
        if a.shape != b.shape:
            raise CheckpointError(
                f"{name} is {tuple(a.shape)} in the first, and {tuple(b.shape)} in the second"
            )
        most, sqnr = compare(a, b)
        told = Difference(name, _form(a), _form(b), _same(first, second, name), most, sqnr)
        true = None if original is None else _tensor(original, name)
        yield told if true is None else _with_nearer(told, true, a, b)


def _form(tensor: QTensor | Tensor | None) -> str:
    if isinstance(tensor, QTensor):
        return str(tensor.spec)
    return _NONE if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _same(first: Opened, second: Opened, name: str) -> bool:
    """Whether both store the tensor as the same plain tensors."""
    leaves = [
        weights[name].names if name in (weights := each.reading.weights) else (name,)
        for each in (first, second)
    ]
    if set(leaves[0]) != set(leaves[1]):
        return False
    taken = {leaf: first.source.take(leaf) for leaf in leaves[0] if leaf in first.source.forms}
    return same_bytes(taken, second.source.take, tuple(taken))


def _with_nearer(
    told: Difference, original: QTensor | Tensor, a: QTensor | Tensor, b: QTensor | Tensor
) -> Difference:
    (_, one), (_, other) = compare(original, a), compare(original, b)
    x, y = (inf if each is None else each for each in (one, other))
    nearer = "both" if x == y else "first" if x > y else "second"
    return replace(told, sqnr_first=one, sqnr_second=other, nearer=nearer)

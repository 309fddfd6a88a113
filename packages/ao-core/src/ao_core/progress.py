"""Showing how far a long loop is: a bar, a function of the caller's, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from ao_core.errors import MissingExtraError

__all__ = ["Progress", "watched"]

#: False or None: no progress; True: a tqdm bar; or a function (done, total, name of the next parameter)
Progress: TypeAlias = bool | Callable[[int, int, str], None] | None

T = TypeVar("T")


def watched(items: Sequence[T], names: Sequence[str], progress: Progress, what: str) -> Iterator[T]:
    """The items, one after the other; a function is called before each, and at the end without a name.

    Raises:
        MissingExtraError: a bar is asked for and tqdm is not installed.
    """
    if callable(progress):
        for done, (item, name) in enumerate(zip(items, names, strict=True)):
            progress(done, len(items), name)
            yield item
        progress(len(items), len(items), "")
        return
    if not progress:
        yield from items
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise MissingExtraError("tqdm", "ao-core[progress]", "progress=True") from error
    yield from tqdm(items, desc=what, unit="tensor")

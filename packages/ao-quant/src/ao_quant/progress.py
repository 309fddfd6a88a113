"""Showing how far a long loop is: a bar, a function of the caller's, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ao_core.errors import MissingExtraError
from ao_core.quantize import Progress

__all__ = ["Progress", "watched"]

T = TypeVar("T")


def watched(items: Sequence[T], names: Sequence[str], progress: Progress, what: str) -> Iterator[T]:
    """The items, one after the other; `progress` as in `quantize_`, called before each with its name."""
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
    yield from tqdm(items, desc=what)

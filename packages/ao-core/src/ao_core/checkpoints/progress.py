"""Progress in bytes: a bar with the time that is left, or calls of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeAlias

from ao_core.errors import MissingExtraError
from ao_core.progress import Progress

__all__ = ["Advance", "bar", "check_progress"]

#: (name of a tensor, bytes of it that are done since the last call)
Advance: TypeAlias = "Callable[[str, int], None]"


def check_progress(progress: Progress) -> None:
    """Raise `MissingExtraError` if a bar is asked for and tqdm is not installed."""
    if progress is True and find_spec("tqdm") is None:
        raise MissingExtraError("tqdm", "ao-core[progress]", "progress=True")


@contextmanager
def bar(progress: Progress, title: str, done: int, total: int) -> Iterator[Advance]:
    """Show that `done` of `total` bytes are done; what is yielded tells of more, by a tensor's name."""
    if callable(progress):
        call = progress

        def advance(name: str, size: int) -> None:
            nonlocal done
            done += size
            call(done, total, name)

        yield advance
        call(total, total, "")
        return
    if not progress:
        yield lambda name, size: None
        return
    from tqdm.auto import tqdm

    with tqdm(
        desc=title, unit="B", unit_scale=True, initial=done, total=total, dynamic_ncols=True
    ) as shown:

        def show(name: str, size: int) -> None:
            shown.update(size)
            shown.set_postfix_str(name, refresh=False)

        yield show

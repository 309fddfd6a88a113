"""Asking records of plugins: whatever goes wrong in an answer is the plugin's problem, and a refusal.

`ask` is for what decides (`unavailable` and `refuses`): a sentence refuses. `blame` adds to an error
out of a kernel, or of a function that was asked for by name, whose it is.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

from ao_core.errors import PluginError
from ao_core.registry import Table

__all__ = ["SLOW", "ask", "attempt", "blame", "owner", "words"]

T = TypeVar("T")

#: seconds after which an answer is slow
SLOW = 0.02
#: so many slow answers in a row, to questions that were just answered, are not the machine's fault
_SLOW_IN_A_ROW = 3
#: symbols of a trace whose value a predicate asked for: torch catches these errors itself
_TRACERS = ("torch.fx", "torch._dynamo", "torch._subclasses")

_slow: dict[tuple[str, str, str], int] = {}


def ask(table: Table[Any], name: str, question: str, *args: Any, timed: bool = True) -> str | None:
    """The answer of a record's predicate: None, or a sentence that refuses.

    An exception, and any other answer, is a refusal that names the provider, and a problem of the
    plugin (see `ao plugins`), with one warning. So is being slow again and again, though such answers count.

    Args:
        table: where the record is.
        name: of the record.
        question: the attribute to call, such as "refuses".
        args: what to call it with.
        timed: whether it must be quick.
    """
    answer, refusal = attempt(table, name, question, *args, timed=timed)
    if refusal is not None or answer is None or (isinstance(answer, str) and answer):
        return refusal or answer
    return _problem(table, name, question, _wrong(answer, "None or a sentence"))


def words(table: Table[Any], name: str, question: str, *args: Any) -> str:
    """The text that a record's function returns; empty where it fails, as `ask` does."""
    answer, refusal = attempt(table, name, question, *args)
    if refusal is None and not isinstance(answer, str):
        _problem(table, name, question, _wrong(answer, "a string"))
    return answer if isinstance(answer, str) else ""


def attempt(
    table: Table[Any],
    name: str,
    question: str,
    *args: Any,
    timed: bool = True,
    passed: type[Exception] | tuple[()] = (),
) -> tuple[Any, str | None]:
    """(what a record's function returns, None), or (None, a refusal) where it raises; see `ask`.

    Errors of the class `passed` go on to the caller: the function may raise them to refuse.
    """
    start = perf_counter()
    try:
        answer = getattr(table.get(name), question)(*args)
    except passed:
        raise
    except (Exception, SystemExit) as error:
        # out of memory is nobody's mistake
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        if type(error).__module__.startswith(_TRACERS):
            raise
        return None, _problem(table, name, question, error)
    if timed and perf_counter() - start > SLOW:
        _check_speed(table, name, question, args)
    return answer, None


def owner(table: Table[Any], name: str) -> str:
    """Whose record it is: "kernel 'fast' of ao-marlin"."""
    return f"{table.kind} {name!r} of {table.provider(name)}"


def blame(error: BaseException, text: str) -> None:
    """Add a sentence to an error that is on its way to the user."""
    note: Callable[[str], None] | None = getattr(error, "add_note", None)
    if note is not None:
        note(text)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10 has no notes
        error.args = (f"{error.args[0]} ({text})", *error.args[1:])


def _wrong(answer: object, expected: str) -> PluginError:
    return PluginError(f"it returned {answer!r:.60}, not {expected}")


def _problem(table: Table[Any], name: str, question: str, error: BaseException) -> str:
    """Note a problem of the record's plugin; what to answer in its place."""
    table.report(name, f"{question} of {table.kind} {name!r}", error)
    text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
    return f"{question} of {owner(table, name)} failed: {' '.join(text.split())}"


def _check_speed(table: Table[Any], name: str, question: str, args: tuple[Any, ...]) -> None:
    """Count a slow answer, unless the next to the same question is quick: then something was found once."""
    start = perf_counter()
    getattr(table.get(name), question)(*args)
    seconds = perf_counter() - start
    key = (table.kind, name, question)
    if seconds < SLOW:
        _slow.pop(key, None)
        return
    _slow[key] = _slow.get(key, 0) + 1
    if _slow[key] == _SLOW_IN_A_ROW:
        error = PluginError(
            f"it takes {seconds * 1000:.0f} ms, and is asked for every kind of call; "
            f"{SLOW * 1000:.0f} ms are slow"
        )
        table.report(name, f"{question} of {table.kind} {name!r}", error)

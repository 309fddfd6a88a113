"""How the time that there is becomes shares of parts, and what each part does with its own.

Plain Python: a part's cases are run by whoever gives its events, in another process or in this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

Clock = Callable[[], float]
#: what a part says while it runs, one key each: "machine", "cases" (names of all), "begun" (a number),
#: "line", "failed", "left_out" (names), "finished" (the machine at the end)
Event = dict[str, Any]
#: (number of the first case, seconds after which none is begun) -> events; they end early where it dies
Start = Callable[[int, float], Iterable[Event]]


class Allowance:
    """Seconds for all parts together: what one leaves goes to those after it."""

    def __init__(
        self, seconds: float, weights: Mapping[str, float], clock: Clock = time.monotonic
    ) -> None:
        self._clock, self._end = clock, clock() + seconds
        self._waiting = dict(weights)

    def left(self) -> float:
        """Seconds until the end, or 0."""
        return max(0.0, self._end - self._clock())

    def begin(self, part: str) -> float:
        """Seconds of a part that begins now: by its weight among those that have not begun."""
        share = self._waiting[part] / sum(self._waiting.values())
        del self._waiting[part]
        return self.left() * share


class AnyCase(Protocol):
    """A name, and what gives lines."""

    @property
    def name(self) -> str: ...

    @property
    def run(self) -> Callable[[], Iterable[dict[str, Any]]]: ...


def events(
    cases: Sequence[AnyCase],
    first: int,
    seconds: float,
    told: Callable[[Exception], str],
    clock: Clock = time.monotonic,
) -> Iterator[Event]:
    """Run cases from a number on; none is begun when the time is over.

    `told` makes a text of an error, or raises where no other case can be run any more.
    """
    end = clock() + seconds
    yield {"cases": [case.name for case in cases]}
    for number in range(first, len(cases)):
        case = cases[number]
        if clock() >= end:
            yield {"left_out": [each.name for each in cases[number:]]}
            return
        yield {"begun": number}
        try:
            for line in case.run():
                yield {"line": line}
        except Exception as error:  # of any library: the other cases are measured
            yield {"failed": {"case": case.name, "reason": told(error)}}


def collected(start: Start, seconds: float, clock: Clock = time.monotonic) -> dict[str, Any]:
    """The results of a part: where it dies in a case, it is started again with the next one."""
    end = clock() + seconds
    found: dict[str, Any] = {"lines": [], "failed": [], "left_out": []}
    names: list[str] = []
    first = 0
    while True:
        begun = None
        for event in start(first, max(0.0, end - clock())):
            ((kind, value),) = event.items()
            if kind == "finished":
                return {**found, "machine_after": value}
            if kind == "cases":
                names = value
            elif kind == "begun":
                begun = value
            elif kind == "line":
                found["lines"].append(value)
            elif kind == "left_out":
                found["left_out"] = value
            elif kind == "failed":
                found["failed"].append(value)
            else:
                found.setdefault(kind, value)
        if begun is None or first >= len(names):
            case = names[first] if first < len(names) else "its start"
            found["failed"].append({"case": case, "reason": "the process ended before any case"})
            return {**found, "left_out": names[first:]}
        ended = {"case": names[begun], "reason": "the process ended in this case"}
        found["failed"].append(ended)
        first = begun + 1
        if first == len(names) or clock() >= end:
            return {**found, "left_out": names[first:]}

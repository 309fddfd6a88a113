"""What a record must be to enter a table: checked once, so that no lookup has to expect anything else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ao_core.errors import PluginError
from ao_core.records import Kernel

if TYPE_CHECKING:
    from ao_core.registry import Registry

__all__ = ["LEAST_PRIORITY", "MOST_PRIORITY", "check_record", "tamed"]

#: where the lowest band of kernels begins, and the highest ends
LEAST_PRIORITY, MOST_PRIORITY = -100, 199


def check_record(record: Any) -> None:
    """Raise `PluginError` where a field of a `Kernel` has a type that selection cannot work with."""
    if not isinstance(record, Kernel):
        return
    wrong = [
        f"{field}={getattr(record, field)!r:.60} is not {expected}"
        for field, expected, holds in (
            ("op", "a string that is not empty", _is_name),
            ("layout", "a string that is not empty", _is_name),
            ("device", "a string that is not empty", _is_name),
            ("priority", "an integer", lambda value: type(value) is int),
            ("fn", "a function", callable),
            ("unavailable", "a function", callable),
            ("refuses", "a function", callable),
            ("describe", "a function", callable),
        )
        if not holds(getattr(record, field))
    ]
    if wrong:
        raise PluginError(f"kernel {record.name!r}: {'; '.join(wrong)}")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def tamed(record: Any, registry: Registry) -> tuple[Any, str | None]:
    """A plugin's record as it is admitted, and what had to be changed; what it must not be is an error.

    One package cannot serve the calls of all others by accident: the priority of a kernel stays within
    the bands, and a kernel that serves the built-in operations names its layouts.

    Raises:
        PluginError: a kernel for every layout, of an operation that ao-core has a reference for.
    """
    if not isinstance(record, Kernel):
        return record, None
    if record.layout == "*" and record.op in {op.name for op in registry.ops.builtin()}:
        raise PluginError(
            f"kernel {record.name!r} is for {record.op} of every layout ('*'), also of those that others "
            "register, which only ao-core's reference is; return one record for each layout it is for"
        )
    priority = min(max(record.priority, LEAST_PRIORITY), MOST_PRIORITY)
    if priority == record.priority:
        return record, None
    change = (
        f"kernel {record.name!r} has priority {record.priority}; the bands go from {LEAST_PRIORITY} to "
        f"{MOST_PRIORITY}, so it counts as {priority}"
    )
    return replace(record, priority=priority), change

"""Records in the tables of this process for a time: for suites over what no package provides yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ao_core.records import Op, Transform
from ao_core.registry import name_of, register, registry

__all__ = ["registered"]


@contextmanager
def registered(*records: Any) -> Iterator[None]:
    """Within this context the registry has these records, in place of any others of their names.

    Afterwards the tables are what they were. Compiled code of before is forgotten, both times.
    """
    if not records:
        yield
        return
    registry.load_plugins()
    tables = registry.tables.values()
    for table in tables:
        table.names()  # built-in records come when a table is first asked
    before = [(dict(table._records), dict(table._providers)) for table in tables]
    owners = dict(registry._transform_of)
    try:
        registry.reopen()
        for record in records:
            for table in tables:
                if table.holds(record):
                    table._records.pop(name_of(record), None)
            if isinstance(record, Transform):
                registry._transform_of.pop(record.config_type, None)
            if isinstance(record, Op):
                registry.kernels._records.pop(record.reference_kernel.name, None)
            register(record)
        yield
    finally:
        for table, (known, providers) in zip(tables, before, strict=True):
            for now, then in ((table._records, known), (table._providers, providers)):
                now.clear()
                now.update(then)
        registry._transform_of.clear()
        registry._transform_of.update(owners)
        registry.reopen()

"""Records in the tables of this process for a time: for suites over what no package provides yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ao_core.model_records import ModelTransform
from ao_core.records import Algorithm, Op, Transform
from ao_core.registry import IN_PROCESS, name_of, registry

__all__ = ["registered"]


@contextmanager
def registered(*records: Any) -> Iterator[None]:
    """Within this context the registry has these records, in place of any others of their names.

    A record that takes a place has the provider of what it replaces, another one "in-process". Afterwards
    the tables are what they were. Compiled code of before is forgotten, both times.
    """
    if not records:
        yield
        return
    registry.load_plugins()
    tables = registry.tables.values()
    for table in tables:
        table.names()  # built-in records come when a table is first asked
    before = [(dict(table._records), dict(table._providers)) for table in tables]
    claims: list[dict[type, Any]] = [
        registry._transform_of,
        registry._algorithm_of,
        registry._model_transform_of,
    ]
    claimed = [dict(each) for each in claims]
    try:
        registry.reopen()
        for record in records:
            provider = IN_PROCESS
            for table in tables:
                if table.holds(record) and table._records.pop(name_of(record), None) is not None:
                    provider = table._providers.pop(name_of(record), IN_PROCESS)
            kinds: tuple[Any, ...] = (Transform, Algorithm, ModelTransform)
            for kind, claim in zip(kinds, claims, strict=True):
                if type(record) is kind:
                    claim.pop(record.config_type, None)
            if isinstance(record, Op):
                registry.kernels._records.pop(record.reference_kernel.name, None)
            registry.add(record, provider)
        yield
    finally:
        pairs: list[tuple[dict[Any, Any], dict[Any, Any]]] = [*zip(claims, claimed, strict=True)]
        for table, (known, providers) in zip(tables, before, strict=True):
            pairs += [(table._records, known), (table._providers, providers)]
        for now, then in pairs:
            now.clear()
            now.update(then)
        registry.reopen()

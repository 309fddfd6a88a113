"""Tests of ao-core alone: kernels and layouts of packages that are installed beside it do not serve."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ao_core.registry import CORE, registry


@contextmanager
def _own_records() -> Iterator[None]:
    """Only what ao-core brings itself; what is registered meanwhile goes again."""
    registry.load_plugins()
    tables = (registry.kernels, registry.layouts)
    # asking for the names makes a table load what is built in
    before = [{name: table._records[name] for name in table.names()} for table in tables]
    for table in tables:
        for name in table.names():
            if table.provider(name) != CORE:
                del table._records[name]
    registry.reopen()
    try:
        yield
    finally:
        for table, records in zip(tables, before, strict=True):
            table._records.clear()
            table._records.update(records)
        registry.reopen()


@pytest.fixture(scope="module", autouse=True)
def own_records() -> Iterator[None]:
    with _own_records():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests() -> Generator[None, None, None]:
    """The suites ask the tables what to try."""
    with _own_records():
        yield


@pytest.fixture
def full_disk(monkeypatch):
    """(step, names) -> a context in which those functions of `os` fail after so many calls in all."""

    @contextmanager
    def full(step: int, *names: str) -> Iterator[SimpleNamespace]:
        disk = SimpleNamespace(calls=0)

        def counted(function):
            def call(*args, **kwargs):
                disk.calls += 1
                if disk.calls > step:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, counted(getattr(os, name)))
            yield disk

    return full

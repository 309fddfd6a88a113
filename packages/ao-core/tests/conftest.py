"""Tests of ao-core alone: kernels and layouts of packages that are installed beside it do not serve."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from torch import Tensor

import ao_core
from ao_core import ComputeWeight, Config, Skip, Spec, Target, Transform
from ao_core.registry import CORE, registry
from ao_core.spec import ROW
from ao_core.weights import matmul_unsupported_reason


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


@dataclass(frozen=True)
class RowwiseTraining(Config):
    """All three matmuls in one number format, one scale per row."""

    dtype: str = "f8e4m3"


def _apply(weight: Tensor, config: RowwiseTraining, target: Target) -> Tensor | Skip:
    if reason := matmul_unsupported_reason(weight, target):
        return Skip(reason)
    row = Spec(config.dtype, ROW)
    return ComputeWeight(weight, *[replace(row, act=row)] * 3)


@pytest.fixture
def rowwise_training() -> Iterator[type[RowwiseTraining]]:
    """A configuration that makes `ComputeWeight`s, known during the test, also as "rowwise_training"."""
    ao_core.register(Transform(RowwiseTraining, "rowwise_training", 1, _apply, needs_values=False))
    yield RowwiseTraining
    registry.transforms._records.pop("rowwise_training")
    registry.transforms._providers.pop("rowwise_training")
    registry._transform_of.pop(RowwiseTraining)


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

"""What all suites share: parameters that follow from class attributes, and samples."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from ao_core.testing.registered import registered

__all__ = ["Suite", "Untried", "as_bytes", "available_devices", "covering", "gaussian", "same_bits"]

T = TypeVar("T")
#: attributes of suites that name what is tried
_NAMED = ("kernel", "layout", "scale_method")


class Suite:
    """Base of the suites. A test that names an argument of `arguments` runs once for each value.

    Attributes:
        records: what is registered while the suite runs, for records that no installed package provides.
    """

    records: Sequence[Any] = ()

    def arguments(self) -> dict[str, Sequence[Any]]:
        """Values of each argument that the tests of this suite may name."""
        return {}

    #: their names, for tests to fail where a record raises before the values are known
    argument_names: tuple[str, ...] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest: parametrize the test with the arguments that it names."""
        for name, values in _arguments_of(type(self)).items():  # type: ignore[arg-type]
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=_id)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _registered(cls) -> Iterator[None]:
        with registered(*cls.records):
            yield


class Untried:
    """In place of a value that cannot be known, since a record raises where it is asked what it takes.

    Collecting goes on, for the sake of other records; a test that uses the value fails, and says why.
    """

    def __init__(self, reason: str, error: BaseException) -> None:
        self._reason, self._error = reason, error

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(self._reason) from self._error

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError(self._reason) from self._error

    def __str__(self) -> str:
        return "untried"


@cache
def _arguments_of(suite: type[Suite]) -> Mapping[str, Sequence[Any]]:
    """Once for all tests of a suite: what fits a kernel is known only by asking for each case."""
    with registered(*suite.records):
        try:
            return suite().arguments()
        except (Exception, SystemExit) as error:  # of any kind: the record is somebody else's
            tried = [f" {name}={getattr(suite, name)!r}" for name in _NAMED if hasattr(suite, name)]
            reason = (
                f"{suite.__name__}{''.join(tried)}: a record raised {type(error).__name__}: {error} where "
                "it was asked what it takes; it must answer None or a sentence"
            )
            return {name: [Untried(reason, error)] for name in suite.argument_names}


def _id(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    if isinstance(value, list):
        return "all"
    return str(value).replace("torch.", "").replace(" ", "-")


def available_devices() -> list[str]:
    """Device types of this machine on which suites run."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def covering(cases: Sequence[T], axes: Callable[[T], tuple[Hashable, ...]]) -> list[T]:
    """Few of the cases, in which any two values of two axes meet that meet in all of them.

    Greedy: those first that bring most pairs which none before them has.
    """
    left = [(i, set(combinations(enumerate(axes(case)), 2))) for i, case in enumerate(cases)]
    met: set[Hashable] = set()
    kept = []
    for wanted in range(max((len(pairs) for _, pairs in left), default=0), 0, -1):
        for i, pairs in left:
            if len(pairs - met) >= wanted:
                met |= pairs
                kept.append(i)
    return [cases[i] for i in sorted(kept)]


def gaussian(shape: Sequence[int], *, seed: int = 0, device: str = "cpu") -> Tensor:
    """Standard normal float32 values, the same in every run; the global generator is not touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors have equal shape, dtype and bytes (NaN equals itself, -0 is not 0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a plain tensor, flat."""
    # a copy, because of one element even a contiguous tensor may have any stride
    return x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def run(suite: type[Suite], test: str) -> None:
    """Call a test of a suite with all values of its arguments, as pytest would."""
    made, values = suite(), dict(_arguments_of(suite))  # type: ignore[arg-type]
    method = getattr(made, test)
    for mark in getattr(method, "pytestmark", ()):
        values[mark.args[0]] = mark.args[1]
    names = list(inspect.signature(method).parameters)
    for arguments in itertools.product(*(values[name] for name in names)):
        method(**dict(zip(names, arguments, strict=True)))

"""What all suites share: parameters that follow from class attributes, and samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

__all__ = ["Suite", "as_bytes", "available_devices", "covering", "gaussian", "same_bits"]

T = TypeVar("T")


class Suite:
    """Base of the suites. A test that names an argument of `arguments` runs once for each value."""

    def arguments(self) -> dict[str, Sequence[Any]]:
        """Values of each argument that the tests of this suite may name."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest: parametrize the test with the arguments that it names."""
        for name, values in _arguments_of(type(self)).items():  # type: ignore[arg-type]
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=_id)


@cache
def _arguments_of(suite: type[Suite]) -> Mapping[str, Sequence[Any]]:
    """Once for all tests of a suite: what fits a kernel is known only by asking for each case."""
    return suite().arguments()


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

"""What all suites share: parameters that follow from class attributes, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["Suite", "as_bytes", "available_devices", "gaussian", "same_bits"]


class Suite:
    """Base of the suites. A test that names an argument of `arguments` runs once for each value."""

    def arguments(self) -> dict[str, Sequence[Any]]:
        """Values of each argument that the tests of this suite may name."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest: parametrize the test with the arguments that it names."""
        for name, values in self.arguments().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=_id)


def _id(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    if isinstance(value, list):
        return "all"
    return str(value).replace("torch.", "").replace(" ", "-")


def available_devices() -> list[str]:
    """Device types of this machine on which suites run."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


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

"""What the tests against other projects' packages share: `python3 -m nox -s "runtimes(interchange)"`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext.interchange import Interchange, Source


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Each test draws the same numbers everywhere."""
    torch.manual_seed(sum(request.node.name.encode()))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """GPT-QModel sets variables of the environment when it is imported."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def read() -> Callable[..., QTensor]:
    """(format, tensors, label, header) -> the one weight that is in them."""

    def read(
        form: Interchange,
        tensors: Mapping[str, Tensor],
        quantization: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        dtype: str = "float16",
    ) -> QTensor:
        forms = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        take = lambda name: tensors[name].clone()  # noqa: E731
        source = Source(forms, take, {"dtype": dtype}, quantization or {}, metadata or {})
        assert form.detect(source)
        (weight,) = form.read(source).weights.values()
        assert set(weight.names) <= set(tensors)
        return weight.make()

    return read


@pytest.fixture(scope="session")
def integers() -> Callable[..., QTensor]:
    """(bits, symmetric, group, shape) -> a matrix of integers with scales of float16."""

    def integers(
        bits: int, symmetric: bool, group: int = 32, shape: tuple[int, int] = (64, 128)
    ) -> QTensor:
        name, zero = (f"int{bits}", "none") if symmetric else (f"uint{bits}", "int")
        spec = Spec(name, (1, group), "float16", zero, "plain" if bits == 8 else "packed")
        return quantize_tensor(torch.randn(shape).half(), spec)

    return integers

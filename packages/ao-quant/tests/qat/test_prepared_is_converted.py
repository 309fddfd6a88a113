"""The forward pass of a prepared model is that of the converted one, bit for bit, for every recipe."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import FqnToConfig, QTensor, quantize_
from ao_core.ext import WeightConfig, registry
from ao_core.ext.quantizing import NothingConvertedWarning
from ao_core.testing.base import gaussian
from ao_quant import QATConfig


class Linear(nn.Module):
    """Two layers, one of odd sizes, and an input of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 64), nn.Linear(64, 37, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.relu(self.first(x)))
        return out


class Embedding(nn.Module):
    """A lookup, and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.head = nn.Embedding(33, 64), nn.Linear(64, 33, bias=False)
        self.head.weight = self.lookup.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.lookup(ids))
        return out


class Conv(nn.Module):
    """Filters in one and in two groups, and of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 6, 3, groups=2)
        self.last = nn.Conv1d(6, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(self.first(x)).flatten(2))
        return out


class Experts(nn.Module):
    """Fused weights (E, N, K) whose transposes are multiplied with sorted rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 48, 64))

    def forward(self, x: Tensor) -> Tensor:
        offs = torch.tensor([2, 2, 5], dtype=torch.int32)
        return torch._grouped_mm(x.bfloat16(), self.experts.transpose(-2, -1), offs=offs)


#: the module, its input, and the names of the weights that are quantized
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]] = {
    "linear": (Linear, lambda: gaussian((2, 3, 96), seed=1), ("first.weight", "second.weight")),
    "embedding": (Embedding, lambda: torch.tensor([[3, 7, 32], [0, 0, 1]]), ("lookup.weight",)),
    "conv": (
        Conv,
        lambda: gaussian((2, 4, 9, 9), seed=1),
        ("first.weight", "second.weight", "last.weight"),
    ),
    "experts": (Experts, lambda: gaussian((5, 64), seed=1), ("experts",)),
}


def _recipes() -> list[str]:
    """All that store weights in another format."""
    registry.load_plugins()
    return [r.name for r in registry.recipes.values() if isinstance(r.config, WeightConfig)]


def _named(recipe: str) -> WeightConfig:
    config = registry.recipes.get(recipe).config
    found = registry.transform_for(type(config)).example or config
    assert isinstance(found, WeightConfig)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", _recipes())
def test_bits(recipe: str, case: str) -> None:
    base = _named(recipe)
    kind, made, names = CASES[case]
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        model, x = kind().to(dtype), made()
        x = x.to(dtype) if x.is_floating_point() else x
        converted = copy.deepcopy(model)
        wanted = quantize_(converted, FqnToConfig(dict.fromkeys(names, base)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingConvertedWarning)
            report = quantize_(model, FqnToConfig(dict.fromkeys(names, QATConfig(base))))
        changed = [record.fqn for record in wanted.with_status("changed")]
        stepped = [n for n in changed if converted.get_parameter(n).spec.input]  # type: ignore[attr-defined]
        changed = [name for name in changed if name not in stepped]
        assert [record.fqn for record in report.with_status("changed")] == changed
        for record in report.with_status("skipped"):
            assert record.reason
        if not changed:
            continue
        context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with context:
            trained, expected = model(x), converted(x)
            with torch.no_grad():
                evaluated = model(x)
        assert torch.equal(trained, expected)
        assert torch.equal(evaluated, expected)
        trained.float().square().sum().backward()
        for name in changed:
            grad = model.get_parameter(name).grad
            assert grad is not None
            assert type(grad) is Tensor
            assert grad.dtype == dtype
            assert bool(grad.isfinite().all())
            assert bool((grad != 0).any())
        quantize_(model, FqnToConfig({n: QATConfig(base, "convert") for n in changed}))
        for name in changed:
            weight, deployed = model.get_parameter(name), converted.get_parameter(name)
            assert isinstance(weight, QTensor)
            assert isinstance(deployed, QTensor)
            assert weight.spec == deployed.spec
            for part, value in weight.parts.items():
                assert torch.equal(value, deployed.parts[part])

"""A visit of experts as modules, whose calls depend on data and on weights before them; wrong arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ao_core.calibration.inputs import batches_of
from ao_core.calibration.statistics import SQUARES
from ao_core.calibration.visit import Inputs, Visit, visit
from ao_core.config import Config
from ao_core.errors import ConfigError, QuantizationError
from ao_core.targets import Decision, decide


def half(entry: Decision, inputs: Inputs) -> Tensor:
    """New values that depend on the statistics."""
    return entry.tensor.detach() * torch.sigmoid(inputs.statistics[0]["squares"].float())


def visited(model: nn.Module, data: list[Tensor], **options: object) -> Visit:
    entries = [entry for entry in decide(model, Config(), None) if entry.config is not None]
    found = batches_of(data, "a test")
    return visit(model, found, entries, lambda entry: (SQUARES,), half, **options)  # type: ignore[arg-type]


class Routed(nn.Module):
    """Experts as modules: which are called depends on the data, and on weights before them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(6, 4), nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = self.up(x)
        best = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if bool((chosen := best == number).any()):
                out[chosen] = expert(x[chosen])
        return x + out


def test_experts_that_only_some_batches_reach() -> None:
    model = nn.Sequential(Routed(), Routed(), nn.Linear(6, 2))
    data = [torch.randn(n, 6) for n in (1, 1, 2, 30)]
    found = visited(model, data)
    assert found.driver == "blocks"
    prefix = visited(model, data, driver="prefix")
    assert found.rows == prefix.rows
    assert all(torch.equal(found.values[name], prefix.values[name]) for name in prefix.values)
    counts = [found.rows.get(f"1.experts.{n}.weight", 0) for n in range(4)]
    assert 20 < sum(counts) <= 34  # rewritten routers may send rows to experts that had none
    nothing = visited(model, data[:1])
    assert 6 <= len(nothing.unseen) <= 8  # of four experts each, at most one sees the row
    assert set(nothing.unseen.values()) == {"the calibration data never reached it"}


def test_arguments() -> None:
    model, data = nn.Sequential(nn.Linear(5, 5)), [torch.randn(3, 5)]
    with pytest.raises(ConfigError, match="driver='block'"):
        visited(model, data, driver="block")
    with pytest.raises(ConfigError, match="data=.*cannot be called"):
        visited(model, [torch.ones(3, 4)])
    with pytest.raises(QuantizationError, match=r"the inputs of 0\.weight have NaN or inf"):
        visited(model, [torch.full((3, 5), torch.nan)])
    lonely = visited(model, data)
    assert (lonely.driver, lonely.reason) == ("prefix", "there are no blocks of weights in a row")
    with pytest.raises(ConfigError, match="driver='blocks': there are no blocks"):
        visited(model, data, driver="blocks")

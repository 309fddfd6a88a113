"""Statistics of pairs: what rows are by now, and what they were before any weight was rewritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ao_core.calibration.gathering import collect
from ao_core.calibration.inputs import batches_of
from ao_core.calibration.statistics import CROSS, HESSIAN, Statistics
from ao_core.calibration.visit import Inputs, Visit, visit
from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.targets import Decision, decide


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.gate(x))


class Model(nn.Module):
    """Two chains of blocks, with a layer before, one between and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.lower = nn.ModuleList(Block() for _ in range(3))
        self.upper = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.lower:
            x = block(x)
        x = torch.tanh(self.middle(x))
        for block in self.upper:
            x = block(x)
        return self.last(x)


def decisions(model: nn.Module) -> list[Decision]:
    return [entry for entry in decide(model, Config(), None) if entry.config is not None]


def visited(model: nn.Module, data: list[Tensor], driver: str) -> tuple[Visit, dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor:
        (statistics,) = inputs.statistics
        assert float(statistics["unpaired"]) == 0
        seen[entry.fqn] = statistics["cross"]
        factor = torch.sigmoid(statistics["cross"].sum(0) / statistics["hessian"].trace())
        return (entry.tensor.detach().double() * factor).float()

    need = (HESSIAN, CROSS)
    found = batches_of(data, "a test")
    made = visit(model, found, decisions(model), lambda _: need, rewrite, driver=driver)
    return made, seen


def inputs_of_layer(model: nn.Module, name: str, data: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _m, a: found.append(a[0]))
    for batch in data:
        model(batch)
    hook.remove()
    return found


@torch.no_grad()
def test_both_drivers_see_the_same_pairs() -> None:
    """And these are the inputs of the model as it was, beside those that the weights before make by then."""
    model, data = Model(), [torch.randn(n, 5) for n in (17, 9)]
    blocks, seen = visited(model, data, "blocks")
    prefix, also = visited(model, data, "prefix")
    assert (blocks.driver, prefix.driver) == ("blocks", "prefix")
    assert blocks.reason.count("called once each in order") == 2
    assert all(torch.equal(seen[name], also[name]) for name in also)
    assert all(torch.equal(blocks.values[n], prefix.values[n]) for n in prefix.values)
    dense = Model()
    dense.load_state_dict(model.state_dict())
    for name, value in blocks.values.items():
        layer = name.removesuffix(".weight")
        was, now = (inputs_of_layer(each, layer, data) for each in (dense, model))
        expected = sum((a.t() @ b).double() for a, b in zip(was, now, strict=True))
        # up and gate see the same inputs, and are rewritten after both have
        torch.testing.assert_close(seen[name], expected, rtol=1e-6, atol=1e-6)
        if not name.endswith("gate.weight"):
            model.get_parameter(name).copy_(value)
        else:
            model.get_parameter(name.replace("gate", "up")).copy_(
                blocks.values[name.replace("gate", "up")]
            )
            model.get_parameter(name).copy_(value)


def test_in_the_model_as_it_is_both_are_the_same() -> None:
    model, data = Model(), [torch.randn(8, 5)]
    for group in collect(model, data, decisions(model), lambda _: (HESSIAN, CROSS)):
        (each,) = group.statistics
        torch.testing.assert_close(each["cross"], each["hessian"])
        assert float(each["unpaired"]) == 0


class Routed(nn.Module):
    """Two experts, chosen by what a weight before them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts = nn.Linear(5, 5), nn.ModuleList(nn.Linear(5, 5) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        chosen, out = x[:, 0] > 0, x.clone()
        for rows, expert in zip((chosen, ~chosen), self.experts, strict=True):
            out[rows] = expert(x[rows])
        return out


def test_rows_that_reach_another_expert_have_no_counterpart() -> None:
    model, unpaired = Routed(), {}

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor:
        unpaired[entry.fqn] = float(inputs.statistics[0]["unpaired"])
        new = entry.tensor.detach().clone()
        new[0] -= 0.5
        return new

    data = [torch.randn(40, 5) for _ in range(2)]
    found = visit(model, data, decisions(model), lambda _: (CROSS,), rewrite)
    assert unpaired["before.weight"] == 0
    assert unpaired["experts.0.weight"] == found.rows["experts.0.weight"]
    assert unpaired["experts.1.weight"] == found.rows["experts.1.weight"]


def test_states_of_pairs() -> None:
    x, was = torch.randn(6, 4), torch.randn(6, 4)
    whole = Statistics((CROSS,)).add(x, was)
    parts = Statistics((CROSS,)).add(x[:2], was[:2]).absorb(x[2:], was[2:]).finish()
    torch.testing.assert_close(whole["cross"], (was.t() @ x).double())
    torch.testing.assert_close(whole["cross"], parts["cross"], rtol=1e-5, atol=1e-5)
    alone = Statistics((CROSS,)).add(x)
    torch.testing.assert_close(alone["cross"], (x.t() @ x).double())
    assert float(whole.merge(alone)["unpaired"]) == 6
    with pytest.raises(ConfigError, match="statistics of pairs"):
        CROSS.of(x, 0)

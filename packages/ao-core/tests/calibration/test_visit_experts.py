"""A visit of experts as modules, whose calls depend on data and on weights before them; wrong arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ao_core.calibration.inputs import batches_of
from ao_core.calibration.statistics import HESSIAN, SQUARES
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


@pytest.mark.parametrize("blocks", [True, False])
def test_one_run_for_all_where_nothing_is_rewritten(blocks: bool) -> None:
    """Each weight has the statistics of its own inputs; with blocks, one block's are held at a time."""
    layers = [nn.Linear(5, 5) for _ in range(3)]
    model = nn.Sequential(*layers) if blocks else Chained(*layers)
    entries = [entry for entry in decide(model, Config(), None) if entry.config is not None]
    data, runs = batches_of([torch.randn(3, 5), torch.randn(2, 5)], "a test"), [0]
    seen: dict[str, Tensor] = {}

    def take(group) -> None:
        seen.update({entry.fqn: inputs.statistics[0]["squares"] for entry, inputs in group})

    hook = layers[0].register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    options = {"driver": "once", "before": take}
    found = visit(model, data, entries, lambda _: (SQUARES,), lambda entry, inputs: None, **options)
    hook.remove()
    assert found.driver == ("blocks" if blocks else "once")
    assert not found.values
    assert runs[0] <= (
        8 if blocks else 4
    )  # a trace, proofs and the statistics, for any number of weights
    x = torch.cat(list(data))
    for entry, layer in zip(entries, layers, strict=True):
        assert torch.allclose(seen[entry.fqn], x.double().square().sum(0), rtol=1e-6)
        x = layer(x).detach()


class Chained(nn.Module):
    """Layers one after the other that are in no list."""

    def __init__(self, one: nn.Module, two: nn.Module, three: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.three = one, two, three

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x)))


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


class Few(nn.Module):
    """Blocks with experts as modules, of which the first gets a row in each batch and the others the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.router = nn.Linear(8, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.up(x)
        chosen, out = 1 + (x[:, 0] > 0).long(), torch.zeros_like(x)
        chosen[0] = 0
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(x[chosen == number])
        return x + out


def borrowed(model: nn.Module, data: list[Tensor], driver: str) -> tuple[Visit, dict[str, Inputs]]:
    entries = [entry for entry in decide(model, Config(), None) if entry.config is not None]
    seen: dict[str, Inputs] = {}

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor:
        seen[entry.fqn] = inputs
        factor = torch.sigmoid(inputs.statistics[0]["hessian"].sum(0))
        return (entry.tensor.detach() * factor).float()

    found = visit(model, data, entries, lambda entry: (HESSIAN,), rewrite, driver=driver)
    return found, seen


def test_an_expert_that_saw_few_rows_borrows_from_all() -> None:
    """H + τ H_all / T_all, of what all see while all of them are as they were; with both drivers."""
    model, data = nn.Sequential(Few(), Few()), [torch.randn(40, 8) for _ in range(3)]
    blocks, seen = borrowed(model, data, "blocks")
    prefix, also = borrowed(model, data, "prefix")
    assert (blocks.driver, prefix.driver) == ("blocks", "prefix")
    for name, inputs in also.items():
        assert torch.equal(inputs.statistics[0]["hessian"], seen[name].statistics[0]["hessian"])
        assert torch.equal(blocks.values[name], prefix.values[name])
        assert inputs.note == seen[name].note
    few = seen["0.experts.0.0.weight"]
    assert (few.rows, few.statistics[0].rows) == (3, 8)
    assert few.note.startswith("this expert saw 3 rows, fewer than its 8 columns")
    assert "the 120 rows of all experts" in few.note
    assert not seen["0.experts.1.0.weight"].note
    rows = []
    hook = model[0].experts[0][0].register_forward_pre_hook(lambda m, a: rows.append(a[0]))
    others = [
        expert[0].register_forward_pre_hook(lambda m, a: rows.append(a[0]))
        for expert in model[0].experts[1:]
    ]
    with torch.no_grad():
        model[0].up.weight.copy_(blocks.values["0.up.weight"])
        for batch in data:
            model[0](batch)
    for handle in (hook, *others):
        handle.remove()
    own = torch.cat(rows[::3]).double()
    every = torch.cat(rows).double()
    expected = own.t() @ own + (8 - 3) / 120 * every.t() @ every
    torch.testing.assert_close(few.statistics[0]["hessian"], expected, rtol=1e-5, atol=1e-5)


def test_layers_that_saw_few_rows_are_no_experts() -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    for driver in ("blocks", "prefix"):
        _, seen = borrowed(Layers(), [torch.randn(5, 8)], driver)
        assert [inputs.note for inputs in seen.values()] == ["", "", ""]

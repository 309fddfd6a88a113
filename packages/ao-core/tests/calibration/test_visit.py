"""A visit: both drivers give the same bits, what each costs, and where blocks cannot be run by themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from visited_models import Block, Model, batches, decisions, equal, shrink, visited

from ao_core.calibration.statistics import HESSIAN, SQUARES
from ao_core.calibration.visit import Inputs, visit
from ao_core.errors import QuantizationError
from ao_core.targets import Decision


def naive(model: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """The same without any of it: hooks on one layer, the whole model for each, in the order of the data."""
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = ["embed.0", "embed.2"]
    for n in range(len(model.layers)):
        names += [f"layers.{n}.{name}" for name in ("q", "k", "v", "o", "mlp.0", "mlp.2")]
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in [*names, "head"]:
            layer, sums = model.get_submodule(name), []
            hook = layer.register_forward_pre_hook(lambda _m, args, s=sums: s.append(args[0]))
            for batch in data:
                model(batch)
            hook.remove()
            rows = [x.reshape(-1, x.shape[-1]).float() for x in sums]
            hessian = sum((x.t() @ x).double() for x in rows)
            weight = layer.weight.detach()
            new = weight.double() * (0.5 + torch.sigmoid(hessian.sum(0) / (1 + hessian.trace())))
            found[f"{name}.weight"] = new.to(weight.dtype)
            if name.rpartition(".")[2] in "qk":  # q, k and v see the model before any of them
                continue
            for each, value in found.items():
                model.get_parameter(each).copy_(value)
        model.load_state_dict(before)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_drivers_are_the_naive_formula(dtype: torch.dtype) -> None:
    model, data = Model().to(dtype), batches(dtype)
    parameters = list(model.parameters())
    blocks, prefix = visited(model, data), visited(model, data, driver="prefix")
    assert blocks.driver == "blocks"
    assert blocks.reason == (
        "embed: 3 blocks, called once each in order; layers: 3 blocks, called once each in order"
    )
    assert prefix.driver == "prefix"
    assert equal(blocks, prefix)
    assert blocks.rows["layers.1.q.weight"] == 28
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.training
    assert not blocks.unseen
    expected = naive(model, data)
    assert expected.keys() == blocks.values.keys()
    for name, value in expected.items():
        assert torch.equal(blocks.values[name], value), name


def test_cost_is_linear_in_the_number_of_blocks() -> None:
    calls = {}
    for depth in (4, 8):
        model = Model(depth)
        visited(model, batches())
        calls[depth] = [block.calls for block in model.layers]
    # for each batch: once to find the order, for each of 4 groups (q, k and v are one), for the outputs
    assert set(calls[4]) | set(calls[8]) == {3 * 6}
    model = Model(4)
    visited(model, batches(), driver="prefix")
    # a run ends where the inputs of its group are seen
    assert [block.calls for block in model.layers] == [3 * (1 + 4 * n + 1) for n in (4, 3, 2, 1)]


def test_batches_that_are_alike_are_traced_once_and_inputs_end_a_run() -> None:
    model, last = Model(), []
    model.layers[1].mlp[2].register_forward_hook(lambda *args: last.append(1))
    data = [torch.randn(2, 7, 5) for _ in range(4)]
    blocks = visited(model, data)
    # the trace of one batch, and for each batch the outputs: no other run goes as far
    assert len(last) == 1 + 4
    assert [block.calls for block in model.layers] == [1 + 4 * 5] * 3
    assert equal(blocks, visited(model, data, driver="prefix"))


class ByValue(Model):
    """What the weights of a block share depends on values, in a way that no trace of one batch shows."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0, 0] > 0:
            return super().forward(x)
        x = self.embed(x)
        for layer in self.layers:
            layer.k.register_forward_pre_hook(lambda _, args: args[0] + 0)
            x = layer(x, x.new_zeros(1), scale=0.5)[0]
        return self.head(x)


def test_sharing_that_depends_on_values_is_an_error() -> None:
    data = [torch.randn(2, 7, 5).abs(), -torch.randn(2, 7, 5).abs()]
    with pytest.raises(
        QuantizationError, match=r"q\.weight, .*have the same inputs .*not in data\[1\]"
    ):
        visited(ByValue(), data, driver="prefix")


def test_a_batch_with_nan_is_named_with_the_weight() -> None:
    data = [torch.randn(2, 7, 5) for _ in range(3)]
    data[2][1, 3, 0] = torch.nan
    with pytest.raises(QuantizationError, match=r"embed\.0\.weight have NaN or inf in data\[2\]"):
        visited(Model(), data)


def test_activations_are_spilled_and_files_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, data = Model(), batches()
    whole = visited(model, data)
    assert whole.spilled == 0
    for budget in (0, 500):
        spilled = visited(model, data, activation_bytes=budget)
        assert spilled.spilled > 1000
        assert equal(spilled, whole)
        assert not list(tmp_path.glob("ao-*"))

    def fail(entry: Decision, inputs: Inputs) -> Tensor:
        assert list(tmp_path.glob("*/*.pt")) or "embed" in entry.fqn
        if entry.fqn == "layers.1.o.weight":
            raise QuantizationError("halfway")
        return shrink(entry, inputs)

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(QuantizationError, match="halfway"):
        visit(model, data, decisions(model), lambda e: (HESSIAN,), fail, activation_bytes=0)
    assert not list(tmp_path.glob("ao-*"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.training


@pytest.mark.parametrize("driver", ["blocks", "prefix"])
def test_an_interrupted_visit_goes_on(driver: str) -> None:
    model, data = Model(), batches()
    whole, done = visited(model, data, driver=driver), dict[str, Tensor]()

    def until_it_stops(entry: Decision, inputs: Inputs) -> Tensor:
        if len(done) == 9:
            raise KeyboardInterrupt
        done[entry.fqn] = shrink(entry, inputs)
        return done[entry.fqn]

    with pytest.raises(KeyboardInterrupt):
        visit(model, data, decisions(model), lambda e: (HESSIAN,), until_it_stops, driver=driver)
    again = visited(model, data, driver=driver, done=done)
    assert list(again.values) == list(whole.values)
    assert all(torch.equal(again.values[name], whole.values[name]) for name in whole.values)


class Cache:
    """What a cache of keys and values is."""


class Cached(Model):
    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(self.embed(x) if x.shape[-1] == 5 else x, x.new_zeros(1), scale=cache)[0]
        return self.head(x)


class Scaled(Model):
    def between(self, number: int, x: Tensor) -> Tensor:
        return x * 2 if number else x


class Skipping(Model):
    """Each block gets what the first one returned, too."""

    def forward(self, x):
        x, first = self.embed(x), None
        for layer in self.layers:
            x = layer(x, x.new_zeros(1) if first is None else first.mean((0, 2)))[0]
            first = x if first is None else first
        return self.head(x)


class HeadOfAll(Model):
    def forward(self, x):
        x, everything = self.embed(x), 0
        for layer in self.layers:
            x = layer(x, x.new_zeros(1))[0]
            everything = everything + x
        return self.head(everything)


class Twice(Model):
    def forward(self, x):
        x = self.embed(x)
        for layer in [*self.layers, *self.layers]:
            x = layer(x, x.new_zeros(1))[0]
        return self.head(x)


class InPlace(Block):
    def forward(self, x, mask, *, scale=1.0):
        return super().forward(x.mul_(0.5), mask, scale=scale)


class InPlaceModel(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(InPlace(6) for _ in range(3))


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.layers[2].q.weight = self.layers[0].q.weight


class Between(Model):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.shared(x).mean((0, 2)))[0]
        return self.head(x)


class Casting(Model):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            with torch.autocast("cpu", torch.bfloat16):
                x = layer(x, x.new_zeros(1))[0]
        return self.head(x.float())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Scaled, "layers: block 1 gets something computed from what an earlier block returned"),
        (Skipping, "layers: block 1 gets something computed from what an earlier block returned"),
        (HeadOfAll, "layers: the inputs of head.weight come from more than its last block"),
        (Twice, "layers: its children are not called once each, in order"),
        (InPlaceModel, "layers: block 0 changes its inputs in place"),
        (Tied, "layers: layers.0.q.weight is used in more than one place"),
        (Between, "layers: shared.weight is used between its blocks"),
        (Casting, "layers: its blocks are called under an autocast or grad mode of the model's own"),
    ],
)  # fmt: skip
def test_where_blocks_cannot_run_by_themselves(make: type[Model], reason: str) -> None:
    model, data = make(), batches()
    found = visited(model, data)
    assert reason in found.reason
    assert equal(found, visited(model, data, driver="prefix"))
    assert next(iter(found.values)) == "embed.0.weight"  # in the order of the data


def test_a_cache_is_no_argument_of_a_block() -> None:
    class Ignoring(Block):
        def forward(self, x, mask, *, scale=None):
            return super().forward(x, mask)

    model = Cached()
    model.layers = nn.ModuleList(Ignoring(6) for _ in range(3))
    found = visited(model, batches())
    assert "layers: block 0 gets a Cache" in found.reason
    assert "use_cache=False" in found.reason


class TwoChains(nn.Module):
    """An encoder, something between, and a decoder that reads what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(6) for _ in range(2))
        self.bridge, self.start = nn.Linear(6, 6), nn.Linear(5, 6)
        self.decoder = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        x = self.start(x)
        mask = x.new_zeros(1)
        for block in self.encoder:
            x = block(x, mask)[0]
        context = self.bridge(x)
        y = torch.ones_like(x)
        for block in self.decoder:
            y = block(y, context.mean((0, 2)))[0]
        return self.head(y)


def test_two_chains_and_what_is_around_them() -> None:
    model, data = TwoChains(), batches()
    found = visited(model, data)
    assert found.reason == (
        "encoder: 2 blocks, called once each in order; decoder: 2 blocks, called once each in order"
    )
    assert equal(found, visited(model, data, driver="prefix"))
    assert equal(found, visited(model, data, activation_bytes=0))
    assert list(found.values)[-1] == "head.weight"


def test_progress_and_needs_of_each_weight() -> None:
    model, calls, needs = Model(1), [], dict[str, list[str]]()

    def keep(entry: Decision, inputs: Inputs) -> None:
        needs[entry.fqn] = [each.name for each in inputs.statistics[0].need]

    visit(
        model,
        batches(),
        decisions(model),
        lambda entry: (HESSIAN,) if entry.fqn.endswith("q.weight") else (SQUARES,),
        keep,
        progress=lambda *args: calls.append(args),
    )
    assert calls[0] == (0, 7, "embed.0.weight")
    assert calls[-1] == (7, 7, "")
    # a group has what any of its weights needs
    assert needs["layers.0.k.weight"] == ["hessian", "squares"]
    assert needs["layers.0.o.weight"] == ["squares"]

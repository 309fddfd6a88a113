"""Algorithms that solve for all weights of a block at once: what they get, and when they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_core import Algorithm, Config, FqnToConfig, Skip, Solved, quantize_
from ao_core.calibration.block import Block, BlockWeight
from ao_core.calibration.inputs import batches_of
from ao_core.calibration.statistics import HESSIAN, Statistic
from ao_core.calibration.visit import AtOnce, visit
from ao_core.errors import QuantizationError
from ao_core.targets import decide
from ao_core.testing.registered import registered


@dataclass(frozen=True)
class HalvedConfig(Config):
    """Weights are halved."""


@dataclass(frozen=True)
class AloneConfig(Config):
    """The same, weight by weight."""


class Residual(nn.Module):
    """Two matrices, a sum and a tuple, of which one is no number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(Residual(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def needs(config: Config) -> tuple[Statistic, ...]:
    return (HESSIAN,)


@dataclass
class Halving:
    """The algorithm, with what it was asked."""

    blocks: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)

    def solve(self, weight: Tensor, statistics: Any, config: Config, target: Any) -> Solved:
        self.alone.append(target.fqn)
        return Solved(weight / 2)

    def solve_block(
        self, block: Block, weights: Sequence[BlockWeight]
    ) -> Mapping[str, Solved | Skip]:
        self.blocks.append(block.name)
        names = {each.fqn: each.values[0] for each in weights}
        self.seen[block.name] = (
            [block.wanted(b) for b in range(block.batches)],
            [block.run(b, {}) for b in range(block.batches)],
            [block.run(b, {n: w / 2 for n, w in names.items()}) for b in range(block.batches)],
            sorted(names),
        )
        return {each.fqn: Solved(each.values / 2, loss=(2.0, 1.0)) for each in weights}

    @contextmanager
    def known(self) -> Iterator[None]:
        record = Algorithm("halved", HalvedConfig, needs, self.solve, solve_block=self.solve_block)
        alone = replace(record, name="alone", config_type=AloneConfig, solve_block=None)
        with registered(record), registered(alone):
            yield


def outputs_of(model: nn.Module, name: str, data: Sequence[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, a, out: found.append(out))
    for each in data:
        model(each)
    handle.remove()
    return found


@pytest.fixture
def data() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, 6), torch.randn(3, 6)]


@torch.no_grad()
def test_blocks_see_original_outputs_and_rewritten_inputs(data: list[Tensor]) -> None:
    """Weights in no block are solved for alone; what is put in follows from what was found."""
    model, dense, halving = Model(), Model(), Halving()
    dense.load_state_dict(model.state_dict())
    with halving.known():
        report = quantize_(model, HalvedConfig(), data=data)
    assert halving.blocks == ["layers.0", "layers.1", "layers.2"]
    assert halving.alone == ["first.weight", "last.weight"]
    for name, (wanted, plain, halved, weights) in halving.seen.items():
        assert weights == [f"{name}.down.weight", f"{name}.up.weight"]
        for place, original in enumerate(outputs_of(dense, name, data)):
            assert len(wanted[place]) == 1
            assert torch.equal(wanted[place][0], original)
            # its inputs come from a first layer that is halved
            assert not torch.equal(plain[place][0], halved[place][0])
            assert not torch.equal(plain[place][0], original)
        for made, found in zip(outputs_of(model, name, data), halved, strict=True):
            assert torch.equal(made, found[0])
    assert torch.equal(model.layers[1].up.weight, dense.layers[1].up.weight / 2)
    record = next(each for each in report if each.fqn == "layers.1.up.weight")
    assert (record.rows, record.loss_before, record.loss_after) == (8, 2.0, 1.0)
    assert report.calibration.startswith("blocks")


@torch.no_grad()
def test_wanted_is_what_the_model_returned(data: list[Tensor]) -> None:
    """Bit for bit, where nothing before the blocks changes, also while their inputs have changed."""
    model, halving = Model(), Halving()
    originals = {f"layers.{k}": outputs_of(model, f"layers.{k}", data) for k in range(3)}
    with halving.known():
        quantize_(model, FqnToConfig({"re:layers.*weight": HalvedConfig(), "*": None}), data=data)
    for name, (wanted, plain, *_) in halving.seen.items():
        for place, original in enumerate(originals[name]):
            assert torch.equal(wanted[place][0], original)
            assert torch.equal(plain[place][0], original) is (name == "layers.0")


def test_gradients_flow_to_the_weights_and_to_nothing_else(data: list[Tensor]) -> None:
    model, found = Model(), {}

    def solve_block(block: Block, weights: Sequence[BlockWeight]) -> dict[str, Solved]:
        leaves = {w.fqn: w.values[0].clone().requires_grad_() for w in weights}
        with torch.enable_grad():
            (out,) = block.run(0, leaves)
            loss = (out - 2 * block.wanted(0)[0]).square().sum()
            found[block.name] = torch.autograd.grad(loss, list(leaves.values()))
        return {w.fqn: Solved(w.values) for w in weights}

    halving = Halving()
    halving.solve_block = solve_block  # type: ignore[method-assign]
    with halving.known():
        quantize_(model, HalvedConfig(), data=data)
    assert list(found) == ["layers.0", "layers.1", "layers.2"]
    assert all(bool(g.abs().sum() > 0) for each in found.values() for g in each)
    assert all(p.grad is None for p in model.parameters())


def test_other_algorithms_in_a_block_come_after(data: list[Tensor]) -> None:
    model, halving = Model(), Halving()
    rules = {"re:.*down.weight": AloneConfig(), "re:.*up.weight": HalvedConfig(), "*": None}
    with halving.known():
        quantize_(model, FqnToConfig(rules), data=data)
    assert halving.alone == [f"layers.{k}.down.weight" for k in range(3)]
    assert [seen[3] for seen in halving.seen.values()] == [
        [f"layers.{k}.up.weight"] for k in range(3)
    ]


def test_without_blocks_weights_are_solved_for_alone(data: list[Tensor]) -> None:
    model, halving = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 3)}), Halving()
    model.forward = lambda x: model["b"](model["a"](x))  # type: ignore[method-assign]
    with halving.known():
        report = quantize_(model, HalvedConfig(), data=data)
    assert (halving.blocks, halving.alone) == ([], ["a.weight", "b.weight"])
    assert report.calibration.startswith("prefix")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda block, weights: {}, r"layers\.0\.up\.weight: .*answered a NoneType"),
        (lambda block, weights: 1 / 0, r"layers\.0: .*raised ZeroDivisionError"),
        (
            lambda block, weights: {w.fqn: Solved(w.values[:, :1]) for w in weights},
            r"layers\.0\.up\.weight: .*\(1, 1, 8\), not \(1, 16, 8\)",
        ),
    ],
)
def test_wrong_answers_name_the_block_or_the_weight(
    answer: Any, text: str, data: list[Tensor]
) -> None:
    model, halving = Model(), Halving()
    kept = dict(model.named_parameters())
    halving.solve_block = answer  # type: ignore[method-assign]
    with halving.known(), pytest.raises(QuantizationError, match=text):
        quantize_(model, HalvedConfig(), data=data)
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())


def test_a_visit_that_goes_on_gives_the_same(data: list[Tensor]) -> None:
    """What was rewritten before is put in without asking, and later blocks get what they would have."""
    model = Model()
    decisions = [each for each in decide(model, HalvedConfig(), None) if each.config is not None]
    asked: list[str] = []

    def rewrite_block(block: Block, weights: Sequence[Any]) -> dict[str, Tensor | None]:
        asked.append(block.name)
        delta = block.run(0, {})[0] - block.wanted(0)[0]
        return {entry.fqn: entry.tensor.detach() * 0.5 + delta.mean() for entry, _ in weights}

    def run(**options: Any) -> dict[str, Tensor]:
        at_once = AtOnce(lambda entry: True, rewrite_block)
        batches = batches_of(data, "test")
        alone = lambda entry, inputs: entry.tensor.detach() * 0.5  # noqa: E731
        made = visit(
            model, batches, decisions, lambda e: (HESSIAN,), alone, at_once=at_once, **options
        )
        return made.values

    whole = run(activation_bytes=0)
    done = {name: value for name, value in whole.items() if name < "layers.1"}
    asked.clear()
    again = run(done=done)
    assert asked == ["layers.1", "layers.2"]
    assert list(again) == list(whole)
    assert all(torch.equal(again[name], value) for name, value in whole.items())

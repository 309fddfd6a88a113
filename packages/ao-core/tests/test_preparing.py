"""Transforms of a model in a list of configurations: their order, their changes, steps that they choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ao_core import (
    Algorithm,
    Config,
    FqnToConfig,
    ModelTransform,
    Prepared,
    QTensor,
    Solved,
    WeightOnlyConfig,
    config_from_json,
    config_to_json,
    quantize_,
)
from ao_core.calibration.statistics import HESSIAN
from ao_core.errors import ConfigError, QuantizationError
from ao_core.graph.copies import sharing, tensors_of
from ao_core.numerics import hadamard_matrix
from ao_core.steps import SCALE, hadamard_step
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.testing.registered import registered

INT8 = WeightOnlyConfig("int8", 16, scale_dtype="float32")


@dataclass(frozen=True)
class Doubling(Config):
    """Twice the weight of every layer; the one called "steps" gets input steps, "untied" an own tensor."""

    base: Config | None = None
    kind: str = "double"


@dataclass(frozen=True)
class Watching(Config):
    """Rounds to nearest, and keeps what it was given."""

    fails: bool = False


SEEN: dict[str, tuple[Tensor, Tensor]] = {}


def _double(model, weights, batches, config):
    tensors = tensors_of(model)
    if config.kind == "steps":
        scale = torch.linspace(0.5, 2, 16)
        one = ChosenSteps((hadamard_step(16),)).then(ChosenSteps((SCALE,), scale))
        return Prepared(model, {entry.fqn: one for entry in weights})
    if config.kind == "untied":
        new = sharing(model)
        new[2].weight = nn.Parameter(new[2].weight.detach() * 3)
        return Prepared(new, {}, {"2.weight": "no longer tied"})
    names = [entry.fqn for entry in weights]
    others = {name: nn.Parameter(2 * tensors[name].detach()) for name in names}
    return Prepared(sharing(model, others), {}, dict.fromkeys(names, "doubled"))


def _watch(weight, seen, config, target):
    SEEN[target.fqn] = weight.clone(), seen[0]["hessian"]
    if config.fails:
        raise QuantizationError("it fails")
    return Solved(None, INT8)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    SEEN.clear()
    transform = ModelTransform(
        "doubling",
        Doubling,
        _double,
        then=lambda config: config.base,
        refuses=lambda config, before: "once is enough" if Doubling() in before else None,
    )
    with registered(transform, Algorithm("watching", Watching, lambda _: (HESSIAN,), _watch)):
        yield


def model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    found = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return found


def data() -> list[Tensor]:
    return [torch.randn(8, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]


@pytest.mark.parametrize("trained", [True, False])
def test_it_comes_before_what_quantizes(trained: bool) -> None:
    dense, made = model(), model().requires_grad_(trained)
    kept = made[0].weight
    report = quantize_(made, [Doubling(), INT8], data=data())
    for place in (0, 2):
        expected = 2 * dense[place].weight
        error = (made[place].weight.dequantize() - expected).norm() / expected.norm()
        assert 0 < error < 0.02
    assert (kept is made[0].weight) is False
    assert {r.fqn: r.note for r in report}["0.weight"] == "doubled"
    assert [r["name"] for r in report.config["sequence"]] == ["doubling", "weight_only"]
    # the configuration of a report stands for those that were given
    again = model().requires_grad_(trained)
    assert quantize_(again, report.config, data=data()).config == report.config
    assert all(map(torch.equal, made.state_dict().values(), again.state_dict().values()))


def test_alone_it_changes_the_model_and_says_so() -> None:
    dense, made = model(), model()
    weight = made[0].weight
    report = quantize_(made, Doubling(), data=data())
    assert torch.equal(made[0].weight, 2 * dense[0].weight)
    assert made[0].weight is weight, "what is trained stays the object it is"
    assert {r.fqn for r in report.with_status("changed")} == {"0.weight", "2.weight"}
    assert config_from_json(config_to_json(Doubling(INT8))) == Doubling(INT8)


def test_names_choose_what_it_is_for() -> None:
    dense, made = model(), model()
    quantize_(made, FqnToConfig({"0": Doubling(INT8), "2": INT8}), data=data())
    errors = [
        float((made[place].weight.dequantize() - times * dense[place].weight).detach().abs().max())
        for place, times in ((0, 2), (2, 1))
    ]
    assert 0 < max(errors) < 0.05


@pytest.mark.parametrize(
    ("configs", "text"),
    [
        (
            [INT8, Doubling()],
            "Doubling changes weights, which are quantized by then",
        ),
        (
            [Doubling(INT8), Doubling()],
            "Doubling changes weights, which are quantized by then",
        ),
        ([Doubling(), Doubling()], "Doubling after Doubling: once is enough"),
    ],
)
def test_orders_that_make_no_sense(configs: list[Config], text: str) -> None:
    made = model()
    with pytest.raises(ConfigError, match=text):
        quantize_(made, configs, data=data())
    assert not any(isinstance(p, QTensor) for p in made.parameters())


def test_it_needs_data_and_dense_weights() -> None:
    made = model()
    with pytest.raises(ConfigError, match="data=batches"):
        quantize_(made, [Doubling(), INT8])
    quantize_(made, INT8)
    with pytest.raises(QuantizationError, match=r"0\.weight is quantized already"):
        quantize_(made, [Doubling(), INT8], data=data())


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["double", "untied"])
def test_where_a_later_one_fails_all_is_as_it_was(trained: bool, kind: str) -> None:
    made = model()
    if kind == "untied":
        made[2].weight = made[0].weight
    made.requires_grad_(trained)
    kept = {name: (p, p.detach().clone()) for name, p in made.named_parameters()}
    with pytest.raises(QuantizationError, match="it fails"):
        quantize_(made, [Doubling(kind=kind), Watching(fails=True)], data=data())
    assert SEEN
    for name, parameter in made.named_parameters():
        assert parameter is kept[name][0]
        assert torch.equal(parameter, kept[name][1])
    assert (made[2].weight is made[0].weight) == (kind == "untied")


def test_what_was_tied_gets_a_record_of_its_own() -> None:
    made = model()
    made[2].weight = made[0].weight
    report = quantize_(made, [Doubling(kind="untied"), INT8], data=data())
    assert [r.fqn for r in report] == [name for name, _ in made.named_parameters()]
    assert {r.fqn: r.note for r in report}["2.weight"] == "no longer tied"
    ratio = (made[2].weight.dequantize() / made[0].weight.dequantize()).detach()
    assert 2.9 < float(ratio.nanmedian()) < 3.1


def test_algorithms_see_weights_and_inputs_after_chosen_steps() -> None:
    """W S⁻¹ and Σ (S x)(S x)ᵀ; the result has the steps, and its values are those of W."""
    dense, made = model(), model()
    quantize_(made, [Doubling(kind="steps"), Watching()], data=data())
    steps = made[0].weight.spec.input
    assert [str(step) for step in steps] == ["hadamard(16)", "scale"]
    x = torch.cat(data())
    s = torch.diag(torch.linspace(0.5, 2, 16)) @ hadamard_matrix(16).float() / 4
    weight, hessian = SEEN["0.weight"]
    torch.testing.assert_close(weight[0], dense[0].weight @ torch.linalg.inv(s), rtol=0, atol=1e-5)
    stepped = (x @ s.T).double()
    torch.testing.assert_close(hessian.double(), stepped.T @ stepped, rtol=1e-5, atol=1e-4)
    for place in (0, 2):
        error = (made[place].weight.dequantize() - dense[place].weight).detach()
        assert float(error.norm() / dense[place].weight.detach().norm()) < 0.02
    out, expected = made(x).detach(), dense(x).detach()
    assert float((out - expected).norm() / expected.norm()) < 0.03


def test_steps_one_after_the_other() -> None:
    two, four = (ChosenSteps((SCALE,), torch.full((4,), n)) for n in (2.0, 4.0))
    assert torch.equal(two.then(four).in_scale, torch.full((4,), 8.0))
    turn = ChosenSteps((hadamard_step(4),))
    with pytest.raises(ConfigError, match="2 steps of kind 'hadamard'"):
        turn.then(turn)
    with pytest.raises(ConfigError, match="2 steps of kind 'scale'"):
        two.then(turn).then(four)
    with pytest.raises(ConfigError, match="in_scale"):
        ChosenSteps((SCALE,))

"""`autoquant`: the fastest by the clock it is given, never below the floor, and every choice explained."""

from __future__ import annotations

import copy
import json
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import ao_core
from ao_core import QTensor
from ao_core.ext import ConfigError, QuantizationError, UnknownNameError
from ao_quant import autoquant
from ao_quant.autotuning import OnePositionWarning

INT8, INT4, DYNAMIC = "int8_weight_only", "int4_weight_only", "int8_dynamic_activation_int8_weight"
THREE = (INT8, INT4, DYNAMIC)


class Model(nn.Module):
    """Layers called once, twice, by other modules, with a tied weight, and never."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 48)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.up = nn.Linear(48, 96)
        self.down = nn.Linear(96, 48)
        self.also_up = nn.Linear(48, 96)
        self.conv = nn.Conv1d(48, 48, 3, padding=1)
        self.head = nn.Linear(48, 20, bias=False)
        self.head.weight = self.embed.weight
        self.never = nn.Linear(48, 48)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for _ in range(2):
            x = x + self.down(torch.relu(self.up(x)) + self.also_up(x[:, :1]))
        x = self.drop(x) + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def ids():
    return torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(1))


class Clock:
    """A timer that says what it was told: seconds by the name of the candidate, and of the layer."""

    def __init__(self, seconds, layers=None):
        self.seconds, self.layers, self.seen = seconds, layers or {}, []

    def __call__(self, trial):
        self.seen.append((trial.fqn, trial.name))
        # an exchange makes the whole model faster, unless told otherwise
        other = {"after": 0.01, "mixed": 0.01}.get(trial.name, 1.0)
        return self.layers.get((trial.fqn, trial.name), self.seconds.get(trial.name, other))


def tune(model, sample, clock, **arguments):
    arguments = {"candidates": THREE, "cache": False, "rounds": 3, "max_loss": 0.1, **arguments}
    return autoquant(model, sample, timer=clock, **arguments)


def chosen(result):
    return {layer.fqn: layer.chosen.config for layer in result.layers}


def test_layers_are_exchanged_where_the_whole_model_becomes_faster(model, ids):
    config8, dynamic = ao_core.resolve_config(INT8), ao_core.resolve_config(DYNAMIC)
    clock = Clock({INT8: 0.5, DYNAMIC: 0.8}, {("down.weight", DYNAMIC): 0.1})
    result = tune(model, ids, clock)
    found = chosen(result)
    assert found["up.weight"] == config8
    assert found["down.weight"] == dynamic
    assert isinstance(model.up.weight, QTensor)
    assert model.down.weight.spec.act is not None
    assert result.report is not None
    done = {record.fqn for record in result.report.with_status("changed")}
    assert done == {fqn for fqn, config in found.items() if config is not None}
    assert result.wholes[result.picked].name == "mixed"
    (taken,) = (each for each in result.exchanges if not each.reason)
    assert (taken.names, taken.before, taken.after) == (("down.weight",), config8, dynamic)
    assert taken.speedup == 100.0
    assert taken.loss == result.wholes[-1].loss <= result.max_loss
    layer = next(layer for layer in result.layers if layer.fqn == "down.weight")
    assert layer.speedup == 10.0
    assert model(ids).shape == (2, 5, 20)


def test_an_exchange_that_does_not_pay_is_not_made(model, ids):
    """A single layer is faster, and the whole model is not."""
    clock = Clock({INT8: 0.5, DYNAMIC: 0.8, "after": 1.0}, {("down.weight", DYNAMIC): 0.1})
    result = tune(model, ids, clock)
    assert result.wholes[result.picked].name == INT8
    assert {c for c in chosen(result).values() if c} == {ao_core.resolve_config(INT8)}
    assert {each.reason for each in result.exchanges} == {"the whole model is not faster with it"}
    assert "0.10×" not in str(result)
    assert "down.weight: int8_weight_only → int8_dynamic" in str(result)
    assert len(str(result).splitlines()) <= 30


def test_an_exchange_that_loses_too_much_is_not_made(model, ids):
    """Int4 promises much and is beyond the limit, alone and in a group."""
    int8 = tune(model, ids, Clock({}), candidates=[INT8], apply=False).wholes[1].loss
    clock = Clock({INT8: 0.5, INT4: 0.1})
    result = tune(model, ids, clock, max_loss=1.01 * int8)
    assert result.wholes[result.picked].name == INT8
    assert result.exchanges
    assert all(each.speedup is None for each in result.exchanges)
    assert all(each.reason.startswith("loses more than max_loss=") for each in result.exchanges)
    assert "after" not in {name for _, name in clock.seen}


def test_never_slower_than_dense(model, ids):
    before = dict(model.named_parameters())
    times = {INT8: 1.01, INT4: 1.5, DYNAMIC: 0.98}
    result = tune(model, ids, Clock(times), min_speedup=1.03, max_loss=math.inf)
    assert set(chosen(result).values()) == {None}
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
    reasons = [each.reason for each in result.wholes[1:]]
    assert {f"{s}× dense is less than 1.03×" for s in ("0.99", "0.67", "1.02")} <= {*reasons}
    faster = tune(model, ids, Clock(times), max_loss=math.inf)
    assert chosen(faster)["up.weight"] == ao_core.resolve_config(DYNAMIC)


@pytest.mark.parametrize("limit", [1e-9, 1e-3, 0.5])
def test_the_limit_is_held(model, ids, limit):
    """Int4 is the fastest here, and loses a hundred times what int8 does: some layers can have it."""
    exact = model.eval()(ids).detach()
    result = tune(model, ids, Clock({INT8: 0.5, INT4: 0.1}), max_loss=limit, apply=False)
    found = {*chosen(result).values()}
    int8, int4 = map(ao_core.resolve_config, (INT8, INT4))
    assert found == {1e-9: {None}, 1e-3: {int8, int4}, 0.5: {int4}}[limit]
    picked = result.wholes[result.picked]
    assert picked.loss <= limit
    for each in result.wholes:
        assert (each.loss > limit) == (each.reason == f"loses more than max_loss={limit:g}")
    assert result.report is None
    assert torch.equal(model(ids), exact)
    ao_core.quantize_(model, result.config)
    noise = (model(ids).detach() - exact).double().square().sum() / exact.double().square().sum()
    assert picked.loss == pytest.approx(float(noise), rel=1e-3, abs=1e-12)


def test_losses_are_those_of_the_data(model, ids):
    """The example is what is timed; the answers to other inputs are compared."""
    data = [ids, ids.flip(0), (ids + 1) % 20]
    one = tune(model, ids[:1, :1], Clock({}), data=data, apply=False)
    other = tune(model, ids, Clock({}), data=data, apply=False)
    assert one.positions == other.positions == 30
    assert [each.loss for each in one.wholes] == [each.loss for each in other.wholes]
    by_example = tune(model, ids, Clock({}), apply=False)
    assert by_example.positions == 10
    assert by_example.wholes[1].loss != other.wholes[1].loss


def test_logits_are_compared_by_divergence(model, ids, with_logits):
    result = tune(with_logits(model), ids, Clock({}), max_loss=None, apply=False)
    assert (result.measure, result.max_loss) == ("kl", 0.05)
    assert "KL, nats" in str(result)
    other = copy.deepcopy(model)
    ao_core.quantize_(other, INT8)
    p, q = (m.eval()(ids).detach().double().log_softmax(-1) for m in (model, other))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert next(w for w in result.wholes if w.name == INT8).loss == pytest.approx(kl, rel=1e-3)


def test_recipes_are_compared_as_quantize_applies_them(model, ids):
    """Output heads keep 8 bits, and have the candidate's in a version of its own."""
    result = tune(model, ids, Clock({INT4: 0.1}), max_loss=math.inf, apply=False)
    names = [each.name for each in result.wholes]
    assert names[:5] == ["dense", INT8, INT4, f"{INT4}, heads too", DYNAMIC]
    other = copy.deepcopy(model)
    ao_core.quantize_(other, INT4)
    (head,) = (c for n, c in dict(result.wholes[2].config.entries).items() if n == "embed.weight")
    assert other.embed.weight.spec.dtype == "int8"
    ao_core.quantize_(model, ao_core.FqnToConfig({"embed.weight": head, "*": None}))
    assert model.embed.weight.spec == other.embed.weight.spec


def test_what_is_used_can_be_said(model, ids):
    """What is timed is the call that the context gives, with the model as it is to be timed."""
    entered, called = [], []

    @contextmanager
    def use(given):
        assert given is model
        entered.append(type(given.up.weight))
        yield lambda: called.append(isinstance(given.up.weight, QTensor))
        entered.append(None)

    class Run(Clock):
        def __call__(self, trial):
            if not trial.fqn:
                trial.run()
            return super().__call__(trial)

    result = tune(model, ids, Run({INT8: 0.5}), candidates=[INT8], use=use, apply=False)
    assert result.wholes[result.picked].name == INT8
    assert len(entered) == len(called)  # in each context one run that is not timed, and one that is
    assert {*called} == {False, True}


def test_each_layer_is_timed_as_the_model_calls_it(model, ids):
    result = tune(model, ids, Clock({INT8: 0.5}), apply=False)
    layers = {layer.fqn: layer for layer in result.layers}
    (up,) = layers["up.weight"].uses
    assert up["module"] == "torch.nn.modules.linear.Linear"
    assert (up["arguments"], up["count"]) == ([["float32[2, 5, 48]"], {}], 2)
    (also,) = layers["also_up.weight"].uses
    assert also["arguments"] == [["float32[2, 1, 48] (240, 48, 1)"], {}]  # a view, by its strides
    (attention,) = layers["attention.out_proj.weight"].uses
    assert attention["module"].endswith("MultiheadAttention")
    assert attention["parameter"] == "out_proj.weight"
    assert attention["arguments"][1] == {"need_weights": False}
    tied = layers["embed.weight"]
    assert tied.tied == ("head.weight",)
    assert [use["arguments"][0] for use in tied.uses] == [["int64[2, 5]"], ["float32[2, 5, 48]"]]
    assert dict(result.kept)["never.weight"] == "the example does not use it"
    assert "1 dimension(s)" in dict(result.kept)["up.bias"]


def test_layers_that_are_called_alike_are_timed_once(ids):
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 96))
    clock = Clock({INT8: 0.5})
    result = tune(model, torch.ones(3, 48), clock)
    assert {fqn for fqn, _ in clock.seen} == {"0.weight", "3.weight", ""}
    assert [layer.chosen.seconds for layer in result.layers] == [0.5] * 3
    assert all(isinstance(p, QTensor) for p in model.parameters() if p.dim() == 2)


def test_what_a_format_cannot_hold_says_why(model, ids):
    result = tune(model, ids, Clock({}))
    conv = next(layer for layer in result.layers if layer.fqn == "conv.weight")
    dynamic = next(t for t in conv.timings if t.config == ao_core.resolve_config(DYNAMIC))
    assert dynamic.seconds is None
    assert "filters of a convolution" in dynamic.reason


def test_the_model_stays_in_its_mode_and_unhooked(model, ids):
    model.train()
    model.conv.eval()
    modes = [module.training for module in model.modules()]
    seen = []
    tune(model, ids, Clock({}), progress=lambda *call: seen.append(call))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [call[0] for call in seen] == list(range(len(seen)))
    assert seen[-1][0] == seen[-1][1] == 7


def test_inputs_of_all_kinds(model, ids):
    for sample in (ids, (ids,), {"ids": ids}):
        result = tune(model, sample, Clock({INT8: 0.5}), apply=False)
        assert chosen(result)["up.weight"] == ao_core.resolve_config(INT8)


@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_models(model, ids, how):
    torch.compiler.reset()
    model.eval()
    if how == "function":
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = model
        model.compile(backend="eager")
    compiled(ids)
    # layers themselves are not compiled here: that takes seconds each
    result = tune(compiled, ids, Clock({INT8: 0.5}), compiled=False)
    assert isinstance(model.up.weight, QTensor)
    assert {layer.fqn for layer in result.layers} >= {"up.weight", "embed.weight"}
    eager = Model().eval()
    eager.load_state_dict({name: p.detach() for name, p in model.state_dict().items()}, assign=True)
    torch.testing.assert_close(compiled(ids), eager(ids))
    torch.compiler.reset()


@pytest.mark.slow
def test_layers_of_compiled_models_are_compiled():
    torch.compiler.reset()
    model = torch.compile(nn.Sequential(nn.Linear(16, 8)))
    compiled = []

    class Watch(Clock):
        def __call__(self, trial):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            trial.run()
            compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
            return super().__call__(trial)

    torch._dynamo.utils.counters.clear()
    result = tune(model, torch.ones(2, 16), Watch({INT8: 0.5}), candidates=[INT8])
    # in the first rounds, one graph of the layer for each candidate; whole models have theirs before they are
    # timed
    assert compiled[:2] == [1, 1]
    assert sum(compiled) == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert [layer.picked for layer in result.layers] == [1]
    assert model(torch.ones(2, 16)).shape == (2, 8)
    torch.compiler.reset()


def test_the_report(model, ids):
    result = tune(model, ids, Clock({INT8: 0.5, INT4: 0.2}, {("conv.weight", INT8): 0.1}))
    data = json.loads(result.to_json())
    assert data["machine"]["torch"] == str(torch.__version__)
    up = next(layer for layer in data["layers"] if layer["fqn"] == "up.weight")
    assert [t["seconds"] for t in up["timings"]] == [1.0, 0.5, 0.2, 1.0]
    assert up["timings"][up["picked"]]["config"]["name"] == INT4
    assert ao_core.config_from_dict(data["config"]) == result.config
    assert ["conv.weight"] in [each["names"] for each in data["exchanges"]]
    text = str(result)
    assert "whole model" in text
    assert "chosen" in text
    assert "conv.weight: int4_weight_only → int8_weight_only, 100.00×: taken" in text
    assert "1 × the example does not use it" in text
    assert "7 of 7 layers quantized" in text
    assert len(text.splitlines()) <= 30
    assert max(map(len, text.splitlines())) <= 120
    other = Model()
    again = ao_core.quantize_(other, result.config)
    assert [r.spec for r in again] == [r.spec for r in result.report]


def test_one_position_is_no_sample():
    """An unusual token alone would decide what is good enough."""
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48))
    with pytest.warns(OnePositionWarning, match="answered with one position"):
        result = tune(model, torch.randn(1, 48), Clock({}), apply=False)
    assert result.positions == 1
    assert "losses over 1 position(s)" in str(result)
    # warnings are errors here: several positions, other data, and the time alone
    tune(model, torch.randn(2, 48), Clock({}), apply=False)
    tune(model, torch.randn(1, 48), Clock({}), data=[torch.randn(3, 48)], apply=False)
    tune(model, torch.randn(1, 48), Clock({}), apply=False, max_loss=math.inf)


def test_whole_models_are_known_next_time(model, ids, tmp_path):
    first, second = Clock({INT8: 0.5}), Clock({INT8: 0.5})
    one = tune(model, ids, first, apply=False, cache=tmp_path)
    other = tune(model, ids, second, apply=False, cache=tmp_path)
    assert second.seen == []
    assert other.wholes == one.wholes


def test_a_model_without_layers():
    result = tune(nn.ReLU(), torch.ones(2), Clock({}))
    assert result.layers == ()
    assert "0 of 0 layers" in str(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"candidates": []}, r"candidates=\[\]"),
        ({"max_loss": math.nan}, "max_loss=nan"),
        ({"max_loss": "high"}, "max_loss='high'"),
        ({"max_loss": -1.0}, r"max_loss=-1\.0: use 0 or more"),
        ({"min_speedup": 0.5}, "min_speedup=0.5: give a factor from 1 on"),
        ({"rounds": 0}, "rounds=0: give a positive number"),
        ({"rounds": 2.0}, r"rounds=2\.0"),
    ],
)
def test_refusals(model, ids, arguments, message):
    with pytest.raises(ConfigError, match=message):
        tune(model, ids, Clock({}), **arguments)
    assert not any(isinstance(p, QTensor) for p in model.parameters())


def test_refusals_that_name_something_else(model, ids):
    with pytest.raises(UnknownNameError, match="unknown recipe 'int9'"):
        tune(model, ids, Clock({}), candidates=["int9"])
    model.up.weight.data[0, 0] = torch.nan
    with pytest.raises(QuantizationError, match="up.weight has 1 NaN"):
        tune(model, ids, Clock({}))

"""`autoquant`: the fastest by the clock it is given, never below the floor, and every choice explained."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import ao_core
from ao_core import QTensor
from ao_core.ext import ConfigError, QuantizationError, UnknownNameError
from ao_quant import autoquant
from ao_quant.autotuning import OneRowWarning

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
        # the whole model is fastest with the choices of layers, unless told otherwise
        other = 0.01 if trial.name == "mixed" else 1.0
        return self.layers.get((trial.fqn, trial.name), self.seconds.get(trial.name, other))


def tune(model, sample, clock, **arguments):
    arguments = {"candidates": THREE, "cache": False, "rounds": 3, **arguments}
    return autoquant(model, sample, timer=clock, **arguments)


def chosen(result):
    return {layer.fqn: layer.chosen.config for layer in result.layers}


def test_the_fastest_for_each_layer(model, ids):
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
    layer = next(layer for layer in result.layers if layer.fqn == "down.weight")
    assert (layer.reason, layer.speedup) == ("the fastest", 10.0)
    assert [t.reason for t in layer.timings if t.config == config8] == ["another is faster"]
    assert model(ids).shape == (2, 5, 20)


def test_a_tie_goes_to_the_smaller_error(model, ids):
    """Times of a layer alone within a tenth are no difference: int8 has 40 dB, int4 about 20."""
    config8, config4 = ao_core.resolve_config(INT8), ao_core.resolve_config(INT4)
    result = tune(model, ids, Clock({INT4: 0.33, INT8: 0.36, DYNAMIC: 0.9}), min_sqnr=-math.inf)
    layer = next(layer for layer in result.layers if layer.fqn == "up.weight")
    assert layer.chosen.config == config8
    assert layer.reason == "about as fast as the fastest, with less error"
    (other,) = (t for t in layer.timings if t.config == config4)
    assert other.reason == "another is about as fast, with less error"
    apart = tune(Model(), ids, Clock({INT4: 0.3, INT8: 0.36, DYNAMIC: 0.9}), min_sqnr=-math.inf)
    assert chosen(apart)["up.weight"] == config4


def test_never_slower_than_dense(model, ids):
    before = dict(model.named_parameters())
    result = tune(model, ids, Clock({INT8: 1.01, INT4: 1.5, DYNAMIC: 0.98}), min_sqnr=-math.inf)
    assert set(chosen(result).values()) == {None}
    assert {layer.reason for layer in result.layers} == {"no other is 1.03× as fast"}
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
    reasons = {t.reason for layer in result.layers for t in layer.timings[1:] if t.seconds}
    assert reasons == {f"{s}× dense is less than 1.03×" for s in ("0.99", "0.67", "1.02")}
    faster = tune(model, ids, Clock({INT8: 1.01, INT4: 1.5, DYNAMIC: 0.98}), min_speedup=1.0)
    assert chosen(faster)["up.weight"] == ao_core.resolve_config(DYNAMIC)


@pytest.mark.parametrize(("floor", "name"), [(60.0, None), (30.0, INT8), (15.0, INT4)])
def test_the_floor_is_held(model, ids, floor, name):
    """Int4 is the fastest here, and has about 20 dB; int8 has about 40."""
    exact = model.eval()(ids).detach()
    result = tune(model, ids, Clock({INT8: 0.5, INT4: 0.1}), min_sqnr=floor, apply=False)
    config = None if name is None else ao_core.resolve_config(name)
    assert chosen(result)["up.weight"] == config
    layer = next(layer for layer in result.layers if layer.fqn == "up.weight")
    if name is not None:
        assert floor <= layer.chosen.sqnr_db < floor + 25
    int4 = next(t for t in layer.timings if t.config == ao_core.resolve_config(INT4))
    if floor > 15:
        assert int4.reason == f"{int4.sqnr_db:.1f} dB are less than min_sqnr={floor:g}"
        assert " faster below " in layer.reason
    assert result.report is None
    assert torch.equal(model(ids), exact)


def test_sqnr_is_that_of_the_layers_output(model, ids):
    model.eval()
    seen = []
    hook = model.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(ids)
    hook.remove()
    result = tune(model, ids, Clock({}), candidates=[DYNAMIC], apply=False)
    layer = next(layer for layer in result.layers if layer.fqn == "up.weight")
    linear = nn.Linear(48, 96)
    linear.load_state_dict(model.up.state_dict())
    exact = linear(seen[0]).detach().double()  # the second call has the same shapes
    ao_core.quantize_(linear, DYNAMIC)
    noise = (linear(seen[0]).detach() - exact).square().sum()
    expected = 10 * torch.log10(exact.square().sum() / noise)
    assert layer.timings[1].sqnr_db == pytest.approx(float(expected), abs=1e-3)


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
    # in the first rounds, one graph of the layer and one of the whole model for each candidate
    assert compiled[:2] == [1, 1]
    assert sum(compiled) == 4
    assert [layer.picked for layer in result.layers] == [1]
    assert model(torch.ones(2, 16)).shape == (2, 8)
    torch.compiler.reset()


def test_the_report(model, ids):
    result = tune(model, ids, Clock({INT8: 0.5, INT4: 0.2}))
    data = json.loads(result.to_json())
    assert data["machine"]["torch"] == str(torch.__version__)
    up = next(layer for layer in data["layers"] if layer["fqn"] == "up.weight")
    assert [t["seconds"] for t in up["timings"]] == [1.0, 0.5, 0.2, 1.0]
    assert up["timings"][up["picked"]]["config"]["name"] == INT8
    assert ao_core.config_from_dict(data["config"]) == result.config
    text = str(result)
    assert (
        "embed.weight = head.weight\n  20×48: int8_weight_only, 1000.0 ms → 500.0 ms, 2.00×, "
        in text
    )
    assert "dB: the fastest; 1 faster below 30 dB" in text
    assert "1 × the example does not use it" in text
    assert "of 7 layers are faster quantized by themselves" in text
    other = Model()
    again = ao_core.quantize_(other, result.config)
    assert [r.spec for r in again] == [r.spec for r in result.report]


def test_layers_that_fare_alike_are_one_block_of_short_lines():
    name = "a_module_with_a_name_as_long_as_those_of_large_models"
    model = nn.Sequential()
    model.add_module(name, nn.Sequential())
    model.get_submodule(name).extend(nn.Linear(48, 48) for _ in range(40))
    long = ao_core.WeightOnlyConfig("int8", 16, scale_dtype="bfloat16", scale_method="mse")
    sample, clock = torch.randn(3, 48), Clock({repr(long): 0.5})
    text = str(tune(model, sample, clock, candidates=[long]))
    assert repr(long)[:20] in text
    assert "and 37 more" in text
    assert len(text.splitlines()) < 19
    assert max(map(len, text.splitlines())) <= 120


def test_one_row_is_no_sample():
    """An unusual token alone would decide what is good enough."""
    model = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48))
    with pytest.warns(OneRowWarning, match=r"0\.weight and 1 more one row of activations"):
        result = tune(model, torch.randn(1, 48), Clock({}), apply=False)
    assert result.one_row == ("0.weight", "2.weight")
    assert "of 2 layers is that of one row" in str(result)
    assert [layer["rows"] for layer in result.to_dict()["layers"]] == [1, 1]
    # warnings are errors here: several rows, and the time alone
    assert not tune(model, torch.randn(2, 48), Clock({}), apply=False).one_row
    tune(model, torch.randn(1, 48), Clock({}), apply=False, min_sqnr=-math.inf)


def test_the_best_uniform_recipe_is_taken_where_a_mixture_is_slower(model, ids):
    """Layers by themselves are faster in different formats, and together slower than in one."""
    clock = Clock(
        {INT8: 0.5, DYNAMIC: 0.8, "mixed": 0.6}, {("down.weight", DYNAMIC): 0.1, ("", "dense"): 1.0}
    )
    result = tune(model, ids, clock)
    by_name = {each.name: each for each in result.wholes}
    assert by_name.keys() == {"dense", INT8, INT4, DYNAMIC, "mixed"}
    assert result.wholes[result.picked].name == INT8
    assert {c for c in dict(result.config.entries).values() if c} == {ao_core.resolve_config(INT8)}
    assert isinstance(model.down.weight, QTensor)
    assert model.down.weight.spec.act is None
    assert "another is faster" in by_name["mixed"].reason
    best = min(w.seconds for w in result.wholes if not w.reason or "another" in w.reason)
    assert result.wholes[result.picked].seconds == best
    text = str(result)
    assert "chosen" in text
    assert len(text.splitlines()) <= 30


def test_the_answer_of_the_whole_model_is_held_to_a_floor(model, ids):
    result = tune(
        model, ids, Clock({INT4: 0.1, INT8: 0.5}), min_sqnr=-math.inf, min_output_sqnr=25.0
    )
    assert result.wholes[result.picked].name == INT8
    int4 = next(w for w in result.wholes if w.name == INT4)
    assert int4.reason == f"{int4.sqnr_db:.1f} dB of the answer are less than 25"
    none = tune(Model(), ids, Clock({INT8: 0.5}), min_output_sqnr=90.0)
    assert none.wholes[none.picked].name == "dense"
    assert set(dict(none.config.entries).values()) == {None}


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
        ({"min_sqnr": math.nan}, "min_sqnr=nan"),
        ({"min_sqnr": "high"}, "min_sqnr='high'"),
        ({"min_output_sqnr": math.nan}, "min_output_sqnr=nan"),
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

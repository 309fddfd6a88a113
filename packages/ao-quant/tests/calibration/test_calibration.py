"""`prepare`, `calibrate` and `convert`: what is seen, what comes of it, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ao_core
import ao_quant
from ao_core import FqnToConfig, QTensor, quantize_
from ao_core.testing.base import same_bits
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    NVFP4StaticActivationNVFP4WeightConfig,
    calibrate,
    convert,
    prepare,
)

#: these models and data have outliers, or few rows; what becomes of such is in test_outliers.py
pytestmark = pytest.mark.filterwarnings("ignore:the inputs of")

INT8 = Int8StaticActivationInt8WeightConfig(on_outliers="keep")
CONFIGS = [
    INT8,
    Int8StaticActivationInt8WeightConfig(False, observer="mse", on_outliers="keep"),
    Float8StaticActivationFloat8WeightConfig(observer="percentile", percentile=99.9),
    NVFP4StaticActivationNVFP4WeightConfig(),
]


def _mlp(dtype=torch.float32):
    return nn.Sequential(nn.Linear(70, 96), nn.GELU(), nn.Linear(96, 33)).to(dtype)


def _batches(dtype=torch.float32, count=3):
    return [torch.randn(7, 70).to(dtype) for _ in range(count)]


def _calibrated(model, config, batches, **options):
    prepare(model, config)
    with torch.no_grad(), calibrate(model):
        for batch in batches:
            model(batch)
    return convert(model, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_scales_are_those_of_all_that_layers_were_given(config, dtype, training, grad):
    model, batches = _mlp(dtype).train(training), _batches(dtype)
    with torch.no_grad():
        hidden = torch.cat([model[1](model[0](batch)) for batch in batches]).float()
    calibration = prepare(model, replace(config, on_outliers="keep"))
    with torch.set_grad_enabled(grad), calibrate(model) as same:
        for batch in batches:
            model(batch)
    assert same is calibration
    for name, data in ("0.weight", torch.cat(batches).float()), ("2.weight", hidden):
        state = calibration.watched[name].state
        assert state.count == data.numel()
        assert state.range == (float(data.min()), float(data.max()))
    report = convert(model)
    assert [r.status for r in report] == ["changed", "unchanged", "changed", "unchanged"]
    for name, q in ("0.weight", model[0].weight), ("2.weight", model[2].weight):
        assert isinstance(q, QTensor)
        assert q.spec.act.is_static
        scaled = calibration.watched[name].scaled()
        zero_point = getattr(scaled, "act_zero_point", None)
        assert float(q.act_scale) == scaled.act_scale
        assert (int(q.act_zero_point) if "act_zero_point" in q.part_names else None) == zero_point
    assert model(batches[0]).dtype == dtype


def test_prepare_and_calibrate_leave_the_model_as_it_is():
    model, x = _mlp(), torch.randn(5, 70)
    before, state = model(x), {n: t.clone() for n, t in model.state_dict().items()}
    parameters = list(model.parameters())
    prepare(model, INT8)
    assert torch.equal(model(x), before)
    with calibrate(model):
        inside = model(x)
        inside.sum().backward()
    assert torch.equal(inside, before)
    assert torch.equal(model(x), before)
    assert model[0].weight.grad is not None
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    model(x * 100)  # outside of the context nobody looks
    assert model._ao_calibration.watched["0.weight"].state.range.high == float(x.max())
    convert(model)
    assert "_ao_calibration" not in vars(model)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_contexts_add_up_and_batches_come_in_any_order():
    model, batches = _mlp(), _batches(count=4)
    other = copy.deepcopy(model)
    for each, order in (model, batches), (other, batches[::-1]):
        prepare(each, INT8)
        for batch in order:
            with calibrate(each):
                each(batch)
        convert(each)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        if isinstance(a, QTensor):
            assert torch.equal(a.act_scale, b.act_scale)
            assert same_bits(a.qdata, b.qdata)


def test_a_prepared_model_can_be_copied():
    model, x = _mlp(), torch.randn(5, 70)
    prepare(model, INT8)
    with calibrate(model):
        model(x)
    twin = copy.deepcopy(model)
    with calibrate(twin):
        twin(10 * x)
    assert float(convert(twin).records[0].bytes_after) < twin[0].in_features * 96 * 4
    assert isinstance(twin[0].weight, QTensor)
    assert not isinstance(model[0].weight, QTensor)
    convert(model)
    assert float(twin[0].weight.act_scale) == pytest.approx(10 * float(model[0].weight.act_scale))


class Shared(nn.Module):
    """Two layers of one weight, one used twice, and one as a plain matmul."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.other = nn.Linear(24, 10, bias=False)

    def forward(self, x):
        x = self.second(self.first(x) * 3)
        return x @ self.other.weight.T + F.linear(x[..., None, :], self.other.weight)[..., 0, :]


def test_a_weight_of_several_layers_sees_what_all_of_them_are_given():
    model, x = Shared(), torch.randn(6, 24)
    calibration = prepare(model, INT8)
    assert list(calibration.watched) == ["first.weight", "other.weight"]
    with torch.no_grad(), calibrate(model):
        model(x)
        middle = model.first(x) * 3
    states = [watched.state for watched in calibration.watched.values()]
    assert [state.count for state in states] == [3 * x.numel(), 2 * x.numel()]
    assert states[0].range.high == float(torch.cat([x, middle]).max())
    convert(model)
    assert model.first.weight is model.second.weight


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kdim", [None, 20])
def test_the_projections_of_attention(batch_first, frozen, kdim):
    attention = nn.MultiheadAttention(32, 4, batch_first=batch_first, kdim=kdim, vdim=kdim)
    attention.eval().requires_grad_(not frozen)
    calibration = prepare(attention, INT8)
    query, key = torch.randn(3, 5, 32), torch.randn(3, 5, kdim or 32) * 2
    for autocast in (False, True):
        with (
            torch.no_grad(),
            torch.autocast("cpu", enabled=autocast),
            calibrate(attention),
        ):
            attention(query, key, key, need_weights=False)
    names = ["in_proj_weight"] if kdim is None else [f"{n}_proj_weight" for n in "qkv"]
    assert list(calibration.watched) == [*names, "out_proj.weight"]
    counts = [watched.state.count for watched in calibration.watched.values()]
    if kdim is None:
        assert counts == [4 * query.numel(), 2 * query.numel()]  # keys and values at once
    else:
        assert counts == [2 * n for n in (query.numel(), key.numel(), key.numel(), query.numel())]
    convert(attention)
    assert attention(query, key, key, need_weights=False)[0].shape == query.shape


def test_autocast_layers_see_what_is_multiplied():
    model, x = nn.Linear(24, 24), torch.randn(5, 24)
    calibration = prepare(model, INT8)
    with torch.autocast("cpu"):
        model(x)  # autocast keeps its casts of weights, but for the context
        with calibrate(model):
            model(x)
            model(x)
    state = calibration.watched["weight"].state
    assert state.count == 2 * x.numel()
    assert state.range.high == float(x.bfloat16().max())


def test_tensors_without_memory_of_their_own_pass():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            x = torch.vmap(lambda row: row * 2 + 1)(x)
            x = x + (torch.eye(6).to_sparse() * 2).to_dense()[0]
            return self.layer(x + torch.ones(6).to("meta").dim())

    model = Odd()
    calibration = prepare(model, INT8)
    with calibrate(model):
        model(torch.randn(5, 6))
    assert calibration.watched["layer.weight"].state.count == 30


def test_a_compiled_model_is_observed_too():
    model, x = _mlp().eval(), torch.randn(5, 70)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        prepare(model, INT8)
        with calibrate(model):
            compiled(2 * x)
        assert model._ao_calibration.watched["0.weight"].state.range.high == float(2 * x.max())
        convert(model)
        torch.testing.assert_close(compiled(x), model(x))
        assert torch.equal(
            torch.compile(model, backend="aot_eager", fullgraph=True)(x), compiled(x)
        )


def test_a_model_that_is_a_compiled_module():
    model, x = torch.compile(_mlp(), backend="aot_eager"), torch.randn(5, 70)
    report = _calibrated(model, "int8_static_activation_int8_weight", [x])
    assert len(report.with_status("changed")) == 2
    assert isinstance(model.get_parameter("_orig_mod.0.weight"), QTensor)
    assert model(x).shape == (5, 33)


def test_other_configurations_beside_it_and_the_report():
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(20, 64),
            "a": nn.Linear(64, 48),
            "b": nn.Linear(48, 33),
            "c": nn.Conv1d(4, 4, 3),
        }
    )
    nvfp4 = "nvfp4_static_activation_nvfp4_weight"
    rules = FqnToConfig({"b": "int4_weight_only", "c": nvfp4, "*": INT8})
    calibration = prepare(model, rules)
    assert list(calibration.watched) == ["a.weight"]
    with calibrate(model):
        model["a"](torch.randn(5, 64))
    report = convert(model)
    status = {r.fqn: (r.status, r.reason) for r in report}
    assert [n for n, (s, _) in status.items() if s == "changed"] == ["a.weight", "b.weight"]
    assert status["embed.weight"] == (
        "unchanged",
        "embeddings are kept unless a FqnToConfig names them or filter_fn selects them",
    )
    assert "filters of a convolution" in status["c.weight"][1]
    assert "'nvfp4_weight_only' would quantize this weight" in status["c.weight"][1]
    assert "static" in report.records[1].spec
    assert ao_core.Report.from_json(report.to_json()).to_dict() == report.to_dict()


def test_the_report_has_a_configuration_that_does_it_again(tmp_path):
    model, x = _mlp(), torch.randn(5, 70)
    dense = copy.deepcopy(model)
    ao_core.save_model(dense, tmp_path / "dense")
    config = Int8StaticActivationInt8WeightConfig(symmetric_activations=False)
    report = _calibrated(model, config, [x])
    again = ao_core.resolve_config(report.config)
    assert ao_core.config_from_json(ao_core.config_to_json(again)) == again
    quantize_(dense, again)
    assert torch.equal(dense(x), model(x))
    ao_quant.quantize_checkpoint(tmp_path / "dense", tmp_path / "static", again)
    loaded = _mlp()
    ao_core.load_model(loaded, tmp_path / "static")
    assert torch.equal(loaded(x), model(x))
    assert loaded[2].weight.spec == model[2].weight.spec


def test_saving_and_loading(tmp_path):
    model, x = _mlp(), torch.randn(5, 70)
    _calibrated(model, CONFIGS[1], [x])
    ao_core.save_model(model, tmp_path)
    with torch.device("meta"):
        loaded = _mlp()
    ao_core.load_model(loaded, tmp_path)
    assert torch.equal(loaded(x), model(x))
    other = _mlp()
    _calibrated(other, CONFIGS[1], [3 * x])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_the_table():
    model = _mlp()
    calibration = prepare(model, CONFIGS[1])
    assert "0.weight (mse): no data yet" in str(calibration)
    with calibrate(model):
        model(torch.linspace(-1, 3, 140).view(2, 70))
    lines = str(calibration).splitlines()
    assert lines[0].startswith("0.weight (mse): 140 values from -1 to 3, scale 0.01")
    assert "zero point 6" in lines[0]
    assert lines[-1] == "133,888 bytes"
    assert calibration.nbytes == 133_888

"""`convert_to_float8_training`: what it converts, what it says, and bad input."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from ao_core import (
    ComputeWeight,
    FqnToConfig,
    QTensor,
    WeightOnlyConfig,
    config_from_json,
    config_from_yaml,
    config_to_json,
    config_to_yaml,
    load_model,
    quantize_,
    quantize_tensor,
    save_model,
)
from ao_core.ext import ConfigError, QuantizationError, UnknownNameError
from ao_core.ext.quantizing import NothingConvertedWarning
from ao_float8 import (
    EmulationWarning,
    Float8LinearConfig,
    Float8Matmul,
    convert_to_float8_training,
    float8_fallback,
)
from ao_float8.config import PRESETS

ROWWISE = Float8LinearConfig.from_recipe_name("rowwise")


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8), nn.LayerNorm(8))


@pytest.fixture
def quiet():
    """Without the warning that a processor emulates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)
        yield


def _low(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if isinstance(p, ComputeWeight)]


def test_the_same_as_quantize(quiet):
    one, two = _model(), _model()
    two.load_state_dict(one.state_dict())
    report = convert_to_float8_training(one, config=ROWWISE)
    again = quantize_(two, "float8/rowwise")
    assert [(r.fqn, r.status, r.reason) for r in report] == [
        (r.fqn, r.status, r.reason) for r in again
    ]
    assert _low(one) == _low(two) == ["0.weight", "2.weight"]
    assert one[0].weight.matmuls == two[0].weight.matmuls
    x = torch.randn(5, 32)
    assert torch.equal(one(x), two(x))


def test_small_layers_stay_by_default_and_say_why():
    model = nn.Sequential(
        *(nn.Linear(*size, device="meta") for size in [(4096, 512), (2048, 2048)])
    )
    for layer in model:
        layer.weight = nn.Parameter(torch.zeros(layer.weight.shape, dtype=torch.bfloat16))
    with pytest.warns(EmulationWarning):
        report = convert_to_float8_training(model, strict=True)
    first, _, second, _ = report
    assert (first.status, second.status) == ("unchanged", "changed")
    assert "910" in first.reason  # 2·4096·512 / (4096 + 512)
    assert "min_mean_dim=0" in first.reason
    convert_to_float8_training(model, config=Float8LinearConfig(min_mean_dim=911))
    assert _low(model) == ["1.weight"]
    with pytest.warns(EmulationWarning):
        convert_to_float8_training(model, config=Float8LinearConfig(min_mean_dim=910))
    assert _low(model) == ["0.weight", "1.weight"]


def test_filter(quiet):
    model = _model()
    convert_to_float8_training(
        model, config=ROWWISE, module_filter_fn=lambda module, name: name == "2"
    )
    assert _low(model) == ["2.weight"]


def test_one_warning_that_it_is_slower():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        convert_to_float8_training(_model(), config=ROWWISE)
    (warning,) = found
    assert warning.category is EmulationWarning
    assert "2 weights (2 on cpu)" in str(warning.message)
    assert "slower" in str(warning.message)
    assert warning.filename == __file__


def test_no_warning_where_torch_multiplies():
    model = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_to_float8_training(model, config="int8_mixed_precision_training")
    assert _low(model) == ["0.weight", "2.weight"]


def test_one_warning_where_nothing_is_converted():
    with pytest.warns(
        NothingConvertedWarning, match="0.weight .and 1 more.: too small to gain"
    ) as w:
        report = convert_to_float8_training(_model())
    assert len(w) == 1
    assert w[0].filename == __file__
    assert not report.with_status("changed")


def test_another_recipe_afterwards_is_refused(quiet):
    model = _model()
    convert_to_float8_training(model, config=ROWWISE)
    with pytest.warns(NothingConvertedWarning, match="an earlier conversion already"):
        convert_to_float8_training(model, config="float8/tensorwise")
    with pytest.raises(QuantizationError, match="an earlier conversion already"):
        convert_to_float8_training(model, config="float8/tensorwise", strict=True)


def test_quantize_warns_of_emulation_too():
    with pytest.warns(EmulationWarning, match="2 weights .2 on cpu") as w:
        quantize_(_model(), "float8/rowwise")
    assert w[0].filename == __file__


def test_twice(quiet):
    model = _model()
    convert_to_float8_training(model, config=ROWWISE)
    weights = list(model.parameters())
    report = convert_to_float8_training(model, config=ROWWISE)
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    assert not report.with_status("changed")
    assert "already" in report.records[0].reason


def test_a_layer_with_two_parents(quiet):
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    report = convert_to_float8_training(model, config=ROWWISE)
    assert report.records[0].tied == ("b.0.weight",)
    assert model["a"][0].weight is model["b"][0].weight
    assert isinstance(shared.weight, ComputeWeight)


def test_float64_stays(quiet):
    model = _model().double()
    with pytest.warns(NothingConvertedWarning, match="float64"):
        (record, *_) = convert_to_float8_training(model, config=ROWWISE)
    assert record.status == "skipped"
    assert "float64" in record.reason
    with pytest.raises(QuantizationError, match="float64"):
        convert_to_float8_training(model, config=ROWWISE, strict=True)


def test_lookups_and_filters_stay(quiet):
    model = nn.ModuleList([nn.Embedding(10, 16), nn.Conv1d(4, 4, 3)])
    with pytest.warns(NothingConvertedWarning, match="a lookup has no matmul"):
        report = convert_to_float8_training(
            model, config=ROWWISE, module_filter_fn=lambda m, n: True
        )
    assert [r.status for r in report] == ["skipped", "skipped", "unchanged"]
    assert not _low(model)


def test_unknown_names(quiet):
    with pytest.raises(UnknownNameError, match="Did you mean 'rowwise'"):
        Float8LinearConfig.from_recipe_name("rowwize")
    with pytest.raises(UnknownNameError, match="float8/rowwize"):
        convert_to_float8_training(_model(), config="float8/rowwize")
    with pytest.raises(ConfigError, match="'7' of the FqnToConfig matches no"):
        convert_to_float8_training(_model(), config=FqnToConfig({"7": ROWWISE}))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"output": Float8Matmul("rows")}, "granularity='rows' of output"),
        ({"grad_input": Float8Matmul(a="e3m4")}, "a='e3m4' of grad_input"),
        ({"grad_weight": "row"}, "grad_weight='row'"),
        ({"min_mean_dim": -1}, "min_mean_dim=-1"),
    ],
)
def test_bad_configurations(arguments, text):
    with pytest.raises(ConfigError, match=text):
        Float8LinearConfig(**arguments)


@pytest.mark.parametrize("name", PRESETS)
def test_configurations_are_text(name):
    config = Float8LinearConfig.from_recipe_name(name, power_of_two_scales=True, min_mean_dim=7)
    assert config_from_json(config_to_json(config)) == config
    assert config_from_yaml(config_to_yaml(config)) == config
    assert isinstance(config.output, Float8Matmul)


@pytest.mark.parametrize(("recipe", "group"), [("rowwise", "row"), ("tensorwise", "tensor")])
def test_trained_weights_are_handed_over(recipe, group, quiet, tmp_path):
    """To a format with the same scales: the codes that the last matmul saw; to a file: plain."""
    model = _model()
    dense = copy.deepcopy(model)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(9, 32)).square().sum().backward()
    optimizer.step()
    weight = model[0].weight
    assert isinstance(weight, ComputeWeight)
    assert not torch.equal(weight.memory, dense[0].weight)
    save_model(model, tmp_path / "model")
    load_model(dense, tmp_path / "model")
    assert torch.equal(dense[0].weight, weight.memory)
    seen = quantize_tensor(weight.memory, weight.matmuls.output)
    report = quantize_(model, WeightOnlyConfig("f8e4m3", group, "float32"))
    assert [r.fqn for r in report.with_status("changed")] == ["0.weight", "2.weight"]
    stored = model[0].weight
    assert isinstance(stored, QTensor)
    stored = stored.canonical()
    assert torch.equal(stored.qdata.view(torch.uint8), seen.qdata.view(torch.uint8))
    assert torch.equal(stored.scale, seen.scale)


def test_fallback_while_training(quiet):
    model = _model()
    dense = copy.deepcopy(model)
    convert_to_float8_training(model, config=ROWWISE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(9, 32)

    def step():
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    step()
    weights = list(model.parameters())
    state = optimizer.state[model[0].weight]["exp_avg"]
    report = float8_fallback(model, "0")
    assert [(r.fqn, r.status) for r in report] == [
        ("0.weight", "unchanged"),
        ("2.weight", "changed"),
    ]
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    dense.load_state_dict(model.state_dict())
    assert torch.equal(model[0](x), dense[0](x))
    assert not torch.equal(model[2](model[0](x)), dense[2](dense[0](x)))
    before = state.clone()
    step()
    assert optimizer.state[model[0].weight]["exp_avg"] is state
    assert not torch.equal(state, before)
    float8_fallback(model, "*.weight")
    dense.load_state_dict(model.state_dict())
    assert torch.equal(model(x), dense(x))


def test_fallback_compiles_anew(quiet):
    model = nn.Sequential(nn.Linear(32, 48))
    convert_to_float8_training(model, config=ROWWISE)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 32)
    low = compiled(x)
    float8_fallback(model, "0")
    high = compiled(x)
    assert not torch.equal(low, high)
    torch.testing.assert_close(high, model(x))
    torch._dynamo.reset()


def test_fallback_of_nothing(quiet):
    model = _model()
    convert_to_float8_training(model, config=ROWWISE)
    with pytest.raises(ConfigError, match=r"'layers\.3\.\*' matches no .*0\.weight, 2\.weight"):
        float8_fallback(model, "0", "layers.3.*")
    assert model[0].weight.matmuls.output is not None

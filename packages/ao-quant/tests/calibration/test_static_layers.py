"""Static scales of convolutions and of experts: their formula, outliers, files, compiling, and failures."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ao_core import (
    QTensor,
    config_from_dict,
    config_from_json,
    config_to_json,
    explain,
    load_model,
    quantize_,
    quantize_checkpoint,
    save_model,
)
from ao_core.ext import ConfigError, QuantizationError
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    NVFP4StaticActivationNVFP4WeightConfig,
    OutlierWarning,
    QATConfig,
    calibrate,
    convert,
    prepare,
)

INT8 = Int8StaticActivationInt8WeightConfig(on_outliers="keep")
FORMATS = {
    "int8": INT8,
    "zero points": replace(INT8, symmetric_activations=False),
    "float8": Float8StaticActivationFloat8WeightConfig(on_outliers="keep"),
    "one for all filters": replace(INT8, granularity="tensor"),
}
CONVS = {
    "1d same": lambda: nn.Conv1d(5, 7, 3, padding="same"),
    "2d stride": lambda: nn.Conv2d(6, 9, (3, 2), stride=2, padding=1, bias=False),
    "2d groups": lambda: nn.Conv2d(6, 9, 3, groups=3, dilation=2, padding=(1, 2)),
    "2d depthwise": lambda: nn.Conv2d(6, 6, 3, groups=6, padding=1, padding_mode="circular"),
    "3d": lambda: nn.Conv3d(2, 3, 3, stride=(1, 2, 1)),
}
#: experts, their outputs and inputs, and the row after each one's last: the second has none, the third few
EXPERTS, N, K = 4, 24, 16
ENDS = (30, 30, 33, 80)


class Experts(nn.Module):
    """The weight of experts, multiplied in one of the ways that models have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(EXPERTS, N, K), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "batch":
            return torch.bmm(x, self.weight.transpose(-2, -1))
        if self.how == "grouped":
            ends = torch.tensor(ENDS, dtype=torch.int32)
            return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)
        starts = (0, *ENDS)
        return torch.cat(
            [F.linear(x[starts[i] : end], self.weight[i]) for i, end in enumerate(ENDS)]
        )


def _conv_data(conv: nn.Module, count: int = 2) -> list[torch.Tensor]:
    sizes = [8 + i for i in range(conv.weight.dim() - 2)]
    return [torch.randn(3, conv.in_channels, *sizes) for _ in range(count)]


def _rounded(x: torch.Tensor, weight: QTensor, scale: torch.Tensor, point: torch.Tensor | None):
    """Activations as the formula rounds them, in float64."""
    kind = weight.spec.act.dtype
    if kind.startswith("f8"):
        codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    elif kind == "int8":
        codes = (x.float() / scale).round().clamp(-128, 127).double()
    else:
        codes = ((x.float() / scale).round() + point.float()).clamp(
            0, 255
        ).double() - point.double()
    return codes * scale.double()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", CONVS)
@pytest.mark.filterwarnings("ignore:the inputs of")
def test_convolutions_are_their_formula(kind, name):
    model = nn.Sequential(CONVS[kind]()).eval().requires_grad_(False)
    data = _conv_data(model[0])
    report = quantize_(model, FORMATS[name], data=data)
    weight = model[0].weight
    assert weight.spec.act.is_static
    assert weight.act_scale.shape == (1,) * weight.dim()
    assert report.records[0].rows
    x = data[0]
    point = weight.act_zero_point.reshape(()) if "act_zero_point" in weight.part_names else None
    exact = copy.deepcopy(model).double()
    exact[0].weight = nn.Parameter(weight.dequantize(torch.float64), requires_grad=False)
    expected = exact(_rounded(x, weight, weight.act_scale.reshape(()), point))
    torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert model(x).is_contiguous()
    if kind != "2d depthwise":  # which pads its input itself
        assert torch.equal(model(x[0]), model(x[:1])[0])
    half = copy.deepcopy(model).to(torch.bfloat16)
    torch.testing.assert_close(half(x.bfloat16()).float(), model(x), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("name", list(FORMATS)[:3])
@pytest.mark.parametrize("how", ["loop", "grouped"])
@pytest.mark.filterwarnings("ignore:the inputs of")
def test_experts_have_a_scale_each(how, name):
    model, x = Experts(how), torch.randn(80, K)
    x[:30] *= 3
    report = quantize_(model, FORMATS[name], data=[x])
    weight = model.weight
    assert weight.act_scale.shape == (EXPERTS, 1, 1)
    first, none, few, last = weight.act_scale.flatten().tolist()
    reach = [float(rows.abs().max()) for rows in (x[:30], x[33:], x)]
    if "act_zero_point" not in weight.part_names:
        most = 448 if name == "float8" else 127
        assert [first, last, none] == pytest.approx([each / most for each in reach], rel=0.01)
    assert none == few  # what all saw
    assert "2 of 4 experts saw fewer rows than they have columns" in report.records[0].note
    points = weight.act_zero_point if "act_zero_point" in weight.part_names else [None] * EXPERTS
    starts, expected = (0, *ENDS), []
    for i, end in enumerate(ENDS):
        rows = _rounded(x[starts[i] : end], weight, weight.act_scale[i], points[i])
        expected.append(rows @ weight.dequantize(torch.float64)[i].t())
    torch.testing.assert_close(model(x).double(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    again = Experts(how)
    again.weight = nn.Parameter(torch.randn(EXPERTS, N, K), requires_grad=False)
    config = config_from_json(config_to_json(config_from_dict(report.config)))
    quantize_(again, config)
    assert torch.equal(again.weight.act_scale, weight.act_scale)


@pytest.mark.parametrize(
    "make", [CONVS["2d groups"], lambda: Experts("loop")], ids=["conv", "experts"]
)
@pytest.mark.filterwarnings("ignore:the inputs of")
def test_three_steps_give_the_same(make):
    model = make().eval().requires_grad_(False)
    model = nn.Sequential(model)
    data = [torch.randn(80, K)] if isinstance(model[0], Experts) else _conv_data(model[0])
    other, config = copy.deepcopy(model), replace(INT8, observer="percentile")
    report = quantize_(model, config, data=data)
    calibration = prepare(other, config)
    with calibrate(other):
        for batch in data:
            other(batch)
    assert "0.weight (percentile): " in str(calibration)
    its = convert(other)
    assert report.config == its.config
    assert report.records[0].note == its.records[0].note
    assert torch.equal(model(data[0]), other(data[0]))


@pytest.mark.parametrize("policy", ["dynamic", "dense", "keep"])
@pytest.mark.parametrize("kind", ["2d stride", "2d groups", "experts"])
def test_outliers(kind, policy):
    """One position of a convolution, or one row of one expert, that is much larger than all others."""
    config = replace(INT8, on_outliers=policy)
    if kind == "experts":
        model, spiked = nn.Sequential(Experts("loop")), torch.randn(80, K)
        spiked[70, 3] = 3000.0
    else:
        model = nn.Sequential(CONVS[kind]()).requires_grad_(False)
        spiked = _conv_data(model[0])[0]
        spiked[0, 3, 4, 4] = 3000.0
    dense = copy.deepcopy(model)
    with pytest.warns(OutlierWarning, match=rf"the inputs of 0\.weight .*'{policy}'"):
        report = quantize_(model, config, data=[spiked])
    assert "outliers: error of the product" in report.records[0].reason
    weight = model[0].weight
    if policy == "dense":
        assert not isinstance(weight, QTensor)
        return
    assert weight.spec.act.is_static == (policy == "keep")
    x = spiked.clone()
    x[x == 3000.0] = 1.0
    error = float((model(x) - dense(x)).norm() / dense(x).norm())
    assert (error < 0.03) == (policy == "dynamic")
    if policy == "dynamic":
        (entry,) = config_from_dict(report.config).entries
        assert entry[1] == Int8DynamicActivationInt8WeightConfig(layers="all")


@pytest.mark.filterwarnings("ignore:the inputs of")
def test_files(tmp_path):
    """A saved model, and a checkpoint that is converted by the configuration of the report."""
    model = nn.ModuleDict({"conv": CONVS["2d stride"](), "experts": Experts("batch")})
    model.requires_grad_(False)
    dense = copy.deepcopy(model)
    save_model(dense, tmp_path / "dense")
    x, rows = _conv_data(model["conv"])[0], torch.randn(EXPERTS, 9, K)
    prepare(model, INT8)
    with calibrate(model):
        expected = model["conv"](x), model["experts"](rows)
    report = convert(model)
    expected = model["conv"](x), model["experts"](rows)
    save_model(model, tmp_path / "saved")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "made", config_from_dict(report.config))
    for folder in ("saved", "made"):
        again = copy.deepcopy(dense)
        load_model(again, tmp_path / folder)
        assert again["conv"].weight.spec == model["conv"].weight.spec
        assert torch.equal(again["conv"](x), expected[0])
        assert torch.equal(again["experts"](rows), expected[1])


@pytest.mark.parametrize("name", list(FORMATS)[:3])
@pytest.mark.filterwarnings("ignore:the inputs of")
def test_compiled(name):
    conv = nn.Sequential(CONVS["2d stride"](), CONVS["2d depthwise"]().to(torch.float32))
    conv[1] = nn.Conv2d(9, 9, 3, groups=9, padding=1)
    conv.requires_grad_(False)
    images, rows = _conv_data(conv[0])[0], torch.randn(EXPERTS, 9, K)
    experts, sorted_ = Experts("batch"), Experts("grouped").to(torch.bfloat16)
    tokens = torch.randn(90, K, dtype=torch.bfloat16)  # ten of nobody
    for model, x in ((conv, images), (experts, rows), (sorted_, tokens)):
        quantize_(model, FORMATS[name], data=[x])
        eager = model(x)
        torch._dynamo.reset()
        made = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        close = {"rtol": 0.02, "atol": 0.05} if x is tokens else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(made, eager, **close)
    assert not made[80:].any()


def test_a_failure_leaves_the_model_as_it_was():
    model = nn.Sequential(CONVS["2d stride"](), nn.ReLU(), nn.Conv2d(9, 4, 1))
    before, x = list(model.parameters()), _conv_data(model[0])
    x[1][0, 0, 0, 0] = torch.nan
    with pytest.raises(QuantizationError, match=r"0\.weight"):
        quantize_(model, INT8, data=x)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert not model[0]._forward_hooks


def test_lost_values_do_not_spread():
    """A NaN makes the positions that see it NaN, and no others."""
    model = nn.Sequential(CONVS["2d stride"]()).requires_grad_(False)
    x = _conv_data(model[0])
    with warnings.catch_warnings(action="ignore"):
        quantize_(model, INT8, data=x)
    spoiled = x[0].clone()
    spoiled[0, 0, 0, 0] = torch.inf
    found, expected = model(spoiled), model(x[0])
    lost = found.isnan()
    assert lost[0, :, 0, 0].all()
    assert int(lost.sum()) == 9
    assert torch.equal(found[~lost], expected[~lost])


def test_gradients_of_inputs_go_through():
    model = nn.Sequential(CONVS["2d groups"]())
    x = _conv_data(model[0])
    with warnings.catch_warnings(action="ignore"):
        quantize_(model, INT8, data=x)
    x = x[0].requires_grad_()
    model(x).sum().backward()
    expected = copy.deepcopy(x.detach()).requires_grad_()
    weight, conv = model[0].weight.dequantize(), model[0]
    F.conv2d(expected, weight, conv.bias, 1, conv.padding, 2, 3).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:the inputs of")
def test_reports_name_kernels():
    model = nn.Sequential(CONVS["2d stride"](), nn.Conv2d(9, 9, 3, groups=9)).requires_grad_(False)
    report = quantize_(model, INT8, data=_conv_data(model[0]))
    kernels = [record.kernel for record in report.with_status("changed")]
    assert kernels == ["int_mm", ""]
    first, second = explain(model).weights
    assert first.calls[0].winner.kernel.name == "int_mm"
    assert "in 9 groups: no kernel takes them" in second.note


def test_what_is_skipped():
    model = nn.ModuleDict(
        {
            "conv": CONVS["1d same"](),
            "turned": nn.ConvTranspose1d(3, 4, 3),
            "pairs": nn.Bilinear(3, 4, 5),
            "experts": Experts("batch"),
        }
    )
    model.requires_grad_(False)
    tried = copy.deepcopy(model)
    skipped = quantize_(tried, Int8DynamicActivationInt8WeightConfig()).with_status("skipped")
    assert {record.fqn for record in skipped} >= {"conv.weight", "experts.weight"}
    everywhere = Int8DynamicActivationInt8WeightConfig(layers="all")
    named = copy.deepcopy(model)
    report = quantize_(named, everywhere, filter_fn=lambda module, fqn: True)
    status = {record.fqn: record for record in report.records}
    assert status["conv.weight"].status == status["experts.weight"].status == "changed"
    assert "none of Conv1d, Conv2d and Conv3d" in status["turned.weight"].reason
    assert "bilinear" in status["pairs.weight"].reason
    nvfp4 = NVFP4StaticActivationNVFP4WeightConfig()
    x = torch.randn(2, 5, 8)
    with pytest.raises(ConfigError, match="no weight would get"):
        prepare(nn.Sequential(CONVS["1d same"]()), nvfp4)
    report = quantize_(nn.Sequential(CONVS["1d same"](), nn.Linear(8, 16)), nvfp4, data=[x])
    assert "a filter has one scale" in report.records[0].reason
    trained = quantize_(nn.Sequential(CONVS["1d same"]()), QATConfig(everywhere, step="prepare"))
    assert "training rounds activations of linear layers only" in trained.records[0].reason
    with pytest.raises(ConfigError, match="layers='some'"):
        Int8DynamicActivationInt8WeightConfig(layers="some")


def test_scales_that_do_not_fit():
    with pytest.raises(ConfigError, match="act_scale"):
        replace(INT8, act_scale=())
    with pytest.raises(ConfigError, match="use as many as act_scale has"):
        replace(INT8, symmetric_activations=False, act_scale=(0.1, 0.2), act_zero_point=(1, 2, 3))
    for module in (nn.Linear(4, 4), Experts("batch")):
        with pytest.raises(ConfigError, match="act_scale has 3 values"):
            quantize_(nn.Sequential(module), replace(INT8, act_scale=(0.1, 0.2, 0.3)))


def test_a_layer_of_many_outputs():
    """The judgement of outliers looks at some of them."""
    model = nn.Sequential(nn.Linear(256, 5000))
    quantize_(model, replace(INT8, max_error_ratio=4.0), data=[torch.randn(80, 256)])
    assert model[0].weight.spec.act.is_static

"""AWQ, SmoothQuant, equalization: the model computes the same, what is searched is not worse, limits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformed_models import (
    FAMILIES,
    WIDTH,
    Decoder,
    Encoder,
    Gated,
    convolutions,
    difference,
    made,
    mlp,
    tokens,
)

from ao_core import FqnToConfig, QTensor, config_from_json, config_to_json, quantize_
from ao_core.ext import ConfigError, GraphError
from ao_core.ext.calibration import ABS_SUMS, HESSIAN
from ao_core.ext.graph import analyze, tensors_of
from ao_core.ext.quantizing import decide
from ao_quant import (
    AWQConfig,
    ClipConfig,
    EqualizeConfig,
    GGUFWeightOnlyConfig,
    GPTQConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    SmoothQuantConfig,
    UIntxWeightOnlyConfig,
)
from ao_quant.algorithms import channels
from ao_quant.algorithms.channels import over_channels
from ao_quant.algorithms.scaling import awq_factors, equalizing_scales

INT4 = Int4WeightOnlyConfig(32)
BOTH = Int8DynamicActivationInt8WeightConfig()


def notes_of(report):
    return {record.fqn: record.note for record in report}


def factors_of(dense, smoothed, norm="one"):
    """What the gains of a norm were divided by."""
    old, new = (getattr(model, norm) for model in (dense, smoothed))
    offset = getattr(old, "offset", 0.0)
    return (old.weight + offset).detach() / (new.weight + offset).detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_the_same(family):
    dense, data = made(FAMILIES[family], outlier=50.0), tokens()
    model = copy.deepcopy(dense)
    report = quantize_(model, SmoothQuantConfig(), data=data)
    assert difference(model(data[0]), dense(data[0])) < 1e-5
    assert float(factors_of(dense, model).std()) > 0.1
    reader = "attn.q_proj.weight"
    assert notes_of(report)[reader] == "SmoothQuant: alpha = 0.5, folded into one.weight" + (
        ", one.bias" if family == "encoder" else ""
    )
    assert "divided by the factors of attn.q_proj.weight" in notes_of(report)["one.weight"]


def test_factors_are_shared_by_readers_and_heads():
    """Queries, keys and values have the factors of their input; two query heads those of one value head."""
    dense, data = made(Decoder), tokens()
    model = copy.deepcopy(dense)
    quantize_(model, SmoothQuantConfig(), data=data)
    factors = factors_of(dense, model)
    for name in ("q_proj", "k_proj"):
        ratio = getattr(model.attn, name).weight / getattr(dense.attn, name).weight
        torch.testing.assert_close(ratio, factors.expand_as(ratio), rtol=1e-4, atol=0)
    columns = (model.attn.o_proj.weight / dense.attn.o_proj.weight)[0].view(2, 2, 8)
    torch.testing.assert_close(columns[:, 0], columns[:, 1], rtol=1e-4, atol=0)
    rows = model.attn.v_proj.bias / dense.attn.v_proj.bias
    torch.testing.assert_close(rows, 1 / columns[:, 0].flatten(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_limits_of_smoothquant(alpha):
    """With 0 all columns have one range afterwards, with 1 all channels of the activations do."""
    dense, data = made(Decoder), tokens()
    model = copy.deepcopy(dense)
    quantize_(model, SmoothQuantConfig(alpha=alpha), data=data)
    seen = []
    model.attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for batch in data:
        model(batch)
    found = model.attn.o_proj.weight if alpha == 0 else torch.cat(seen).flatten(0, 1)
    ranges = (
        found.detach().abs().amax(0).view(2, 2, 8).amax(1)
    )  # of the heads that share one of values
    torch.testing.assert_close(ranges, torch.ones(2, 8), rtol=1e-4, atol=1e-4)


def test_smoothquant_quantizes_outliers_better():
    dense, data = made(Decoder, outlier=50.0), tokens()
    errors = {}
    for config in (BOTH, SmoothQuantConfig(BOTH, alpha=0.5), SmoothQuantConfig(BOTH)):
        model = copy.deepcopy(dense)
        quantize_(model, config, data=None if config is BOTH else data)
        assert isinstance(model.mlp.down_proj.weight, QTensor)
        assert not model.attn.q_proj.weight.spec.input
        errors[str(getattr(config, "alpha", None))] = difference(model(data[0]), dense(data[0]))
    assert 0 < errors["0.5"] < 0.4 * errors["None"]
    assert 0 < errors["search"] < 0.5 * errors["None"]


def test_exponents_are_searched_after_norms_only():
    """What is chosen has the least error of all exponents; between two weights it is 0.5."""
    dense, data = made(Decoder, outlier=50.0).requires_grad_(False), tokens()
    readers = ("q_proj", "k_proj", "v_proj")

    def outputs(model, name):
        layer, rows = getattr(model.attn, name), []
        with layer.register_forward_hook(lambda layer, args, out: rows.append(out)):
            for batch in data:
                model(batch)
        found = torch.cat(rows).flatten(0, 1)
        return found if layer.bias is None else found - layer.bias

    def error_of(alpha):
        """Of the three layers together, relative to the outputs of each row."""
        model, config = copy.deepcopy(dense), SmoothQuantConfig(BOTH, alpha)
        quantize_(model, FqnToConfig({r"re:attn\.[qkv]_proj.*": config}), data=data)
        pairs = [(outputs(dense, name), outputs(model, name)) for name in readers]
        return sum(float(((b - a).norm(dim=-1) / a.norm(dim=-1)).square().sum()) for a, b in pairs)

    of_all = [error_of(alpha / 10) for alpha in range(11)]
    assert error_of("search") <= 1.001 * min(of_all) < 0.95 * of_all[5]
    found = notes_of(quantize_(copy.deepcopy(dense), SmoothQuantConfig(BOTH), data=data))
    assert "alpha = 0.5, folded into mlp.up_proj.weight" in found["mlp.down_proj.weight"]


def rounded(values, bits):
    """To nearest in each row, between its least and greatest value, 0 among them."""
    low, high = (
        values.amin(-1, keepdim=True).clamp(max=0),
        values.amax(-1, keepdim=True).clamp(min=0),
    )
    scale = (high - low).clamp(min=1e-12) / (2**bits - 1)
    zero = (-low / scale).round()
    return ((values / scale).round().add(zero).clamp(0, 2**bits - 1) - zero) * scale


def awq_of_the_paper(weight, x, bits, group):
    """The error of the outputs by arXiv:2306.00978, 3.2, and the clipping of its code, in float64."""
    mean = x.abs().mean(0).clamp(min=1e-4)

    def error_of(values):
        return float((x @ (values - weight).t()).square().sum())

    def grouped(values):
        return values.unflatten(-1, (-1, group))

    found = {}
    for step in range(20):
        s = mean ** (step / 20)
        s = s / (s.max() * s.min()).sqrt()
        found[error_of(rounded(grouped(weight * s), bits).flatten(1) / s)] = s
    s = found[min(found)]
    wide, inputs = grouped(weight * s), (x / s).unflatten(-1, (-1, group))
    best, least = wide, torch.full(wide.shape[:2], torch.inf, dtype=torch.float64)
    for by in range(10):
        most = wide.abs().amax(-1, keepdim=True) * (1 - by / 20)
        new = rounded(wide.clamp(-most, most), bits)
        error = torch.einsum("tgk,ngk->tng", inputs, new - wide).square().sum(0)
        best = torch.where((error < least)[..., None], new, best)
        least = torch.minimum(least, error)
    return error_of(best.flatten(1) / s)


@pytest.mark.parametrize("bits", [4, 3])
def test_awq_is_as_good_as_that_of_the_paper(bits):
    """Written once more, in float64: same weight, data and format."""
    generator = torch.Generator().manual_seed(bits)
    dense = nn.Sequential(nn.RMSNorm(96), nn.Linear(96, 64, bias=False)).requires_grad_(False)
    dense[0].weight.copy_(torch.exp(0.5 * torch.randn(96, generator=generator)))
    dense[0].weight[::17] *= 20
    dense[1].weight.copy_(torch.randn(64, 96, generator=generator) / 10)
    data = list(torch.randn(400, 96, generator=generator).split(100))
    model = copy.deepcopy(dense)
    quantize_(model, AWQConfig(UIntxWeightOnlyConfig(bits, 32)), data=data)
    x = torch.cat(data)
    own = float((model(x).double() - dense(x).double()).square().sum())
    theirs = awq_of_the_paper(dense[1].weight.double(), dense[0](x).double(), bits, 32)
    assert own <= 1.02 * theirs


def test_where_nothing_makes_the_channels_factors_are_an_input_step():
    dense, data = made(Encoder), tokens()
    model = copy.deepcopy(dense)
    report = quantize_(model, [SmoothQuantConfig(), GPTQConfig(INT4)], data=data)
    assert [str(step) for step in model.fc2.weight.spec.input] == ["scale"]
    assert not model.fc1.weight.spec.input
    assert (
        "as an input step: nothing that makes them can be divided" in notes_of(report)["fc2.weight"]
    )
    assert 0 < difference(model.fc2.weight.dequantize(), dense.fc2.weight) < 0.2
    gguf = quantize_(
        copy.deepcopy(dense), [SmoothQuantConfig(), GGUFWeightOnlyConfig("q8_0")], data=data
    )
    assert "a GGUF file has no place" in notes_of(gguf)["fc2.weight"]


def test_a_factor_that_changes_the_outputs_is_undone(monkeypatch):
    """As for a norm whose offset was not seen: those channels get an input step, the others stay folded."""
    right = channels.scaled

    def wrong(tensors, group, scales):
        found = right(tensors, group, scales)
        return found | (
            {"one.weight": tensors["one.weight"] / scales} if group.name == "one.weight" else {}
        )

    dense, data = made(FAMILIES["gemma"]), tokens()
    model = copy.deepcopy(dense)
    monkeypatch.setattr(channels, "scaled", wrong)
    report = quantize_(model, [SmoothQuantConfig(alpha=0.5), INT4], data=data)
    notes = notes_of(report)
    assert (
        "as an input step: SmoothQuant: the outputs for the example inputs"
        in notes["attn.q_proj.weight"]
    )
    assert torch.equal(model.one.weight, dense.one.weight)
    assert "folded into two.weight" in notes["mlp.up_proj.weight"]
    assert [str(step) for step in model.attn.q_proj.weight.spec.input] == ["scale"]


def _channels(model, data, config=INT4):
    weights = [d for d in decide(model, config, None) if d.config]
    found = over_channels(model, weights, data, (HESSIAN, ABS_SUMS), {}, lambda each: each)
    return {each.readers[0].entry.fqn: each for each in found}


def test_awq_takes_more_of_an_outlier_and_is_never_worse_than_rounding():
    data = tokens()
    plain, planted = (_channels(made(Decoder, outlier=o), data) for o in (1.0, 50.0))
    for each in plain.values():
        factors, ratio, error = awq_factors(each, 10)
        assert error <= 1
        assert (ratio == 0) == torch.equal(factors, torch.ones_like(factors))
    # the weights of an outlier channel are as large as those of others: then their steps matter more
    model = made(Decoder)
    with torch.no_grad():
        model.one.weight[3] *= 50
    found = _channels(model, data)["attn.q_proj.weight"]
    factors, ratio, error = awq_factors(found, 10)
    assert ratio > 0
    assert error < 0.7
    assert int(factors.argmax()) == 3
    assert len(found.readers) == 3
    assert planted.keys() == plain.keys()


def test_awq_of_no_exponents_is_rounding_and_clipping_is_apart():
    """r = 0 is in the grid; with inputs of one size nothing else is better than it."""
    model = nn.Sequential(nn.Linear(32, 16, bias=False)).eval()
    data = [torch.eye(32)]
    nearest, found = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(nearest, INT4)
    report = quantize_(found, AWQConfig(INT4, clip=False), data=data)
    assert torch.equal(found[0].weight.dequantize(), nearest[0].weight.dequantize())
    assert notes_of(report)["0.weight"] == "AWQ: r = 0, no factors are better"
    assert AWQConfig(INT4).then() == ClipConfig(INT4)
    assert AWQConfig(GPTQConfig(INT4)).then() == GPTQConfig(INT4)


def test_awq_and_what_comes_after_it():
    dense, data = made(Decoder, outlier=50.0), tokens()
    errors = []
    for config in (INT4, AWQConfig(INT4), [AWQConfig(), GPTQConfig(INT4)]):
        model = copy.deepcopy(dense)
        quantize_(model, config, data=None if config is INT4 else data)
        assert model.attn.q_proj.weight.spec.dtype == "uint4"
        errors.append(difference(model(data[0]), dense(data[0])))
    assert 0.01 < errors[1] < errors[0]
    assert 0.01 < errors[2] < errors[0]


@pytest.mark.parametrize("make", [mlp, convolutions, Gated, Decoder])
def test_equalized_weights_have_the_same_ranges_on_both_sides(make):
    dense = made(make)
    x = (
        tokens(1)[0]
        if make is Decoder
        else torch.randn(4, *((3, 8, 8) if make is convolutions else (WIDTH,)))
    )
    model = copy.deepcopy(dense)
    quantize_(model, EqualizeConfig(), data=[x])
    assert difference(model(x), dense(x)) < 1e-5
    groups = [
        group
        for group in analyze(model, x).scale_groups
        if all(
            any(tensors_of(model)[s.parameter].dim() > 1 for s in side)
            for side in (group.producers, group.consumers)
        )
    ]
    assert groups
    for scales in equalizing_scales(tensors_of(model), groups, 1):
        torch.testing.assert_close(scales, torch.ones_like(scales), rtol=2e-3, atol=0)
    before = equalizing_scales(tensors_of(dense), groups, 1)
    assert max(float((scales - 1).abs().max()) for scales in before) > 0.1


def test_bfloat16_models_are_proven_in_float32():
    dense, data = made(FAMILIES["gemma"], outlier=50.0).bfloat16(), tokens()
    model = copy.deepcopy(dense)
    report = quantize_(model, [SmoothQuantConfig(), BOTH], data=data)
    assert "folded" in notes_of(report)["attn.q_proj.weight"]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert difference(model(data[0]).float(), dense(data[0]).float()) < 0.1


def test_a_model_that_cannot_be_traced_gets_input_steps():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x):
            return self.layer(self.norm(x)) * float(x.sum().item() > 0)

    model, data = Odd().eval(), [torch.randn(40, WIDTH)]
    report = quantize_(model, SmoothQuantConfig(BOTH), data=data)
    assert [str(step) for step in model.layer.weight.spec.input] == ["scale"]
    assert "torch.export cannot trace" in notes_of(report)["layer.weight"]
    with pytest.raises(ConfigError, match="torch.export cannot trace"):
        quantize_(Odd().eval(), EqualizeConfig(), data=data)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SmoothQuantConfig(alpha=1.5), r"alpha=1\.5.*from 0 to 1.*'search'"),
        (lambda: SmoothQuantConfig(alpha="serach"), "alpha='serach'"),
        (lambda: AWQConfig(AWQConfig(INT4)), "base=.*FqnToConfig around AWQConfig"),
        (lambda: AWQConfig(FqnToConfig({"*": INT4})), "base=.*FqnToConfig around AWQConfig"),
        (lambda: AWQConfig(steps=0), "steps=0"),
        (lambda: ClipConfig(least=0.0), r"least=0\.0"),
        (lambda: EqualizeConfig(rounds=0), "rounds=0"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_what_cannot_work_says_so():
    model, data = made(Decoder), tokens()
    with pytest.raises(ConfigError, match=r"base=None.*\[AWQConfig\(\), GPTQConfig\(\.\.\.\)\]"):
        quantize_(model, AWQConfig(), data=data)
    with pytest.raises(ConfigError, match="no two weights between which scales pass"):
        quantize_(
            nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)),
            EqualizeConfig(),
            data=[torch.ones(2, 4)],
        )
    assert issubclass(GraphError, Exception)
    for config in (
        AWQConfig("int4_weight_only"),
        SmoothQuantConfig(BOTH, "search"),
        EqualizeConfig(),
    ):
        assert config_from_json(config_to_json(config)) == config

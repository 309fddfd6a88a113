"""Rotations: the model computes the same, outliers are gone, H is that of what is multiplied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformed_models import (
    FAMILIES,
    HIDDEN,
    WIDTH,
    Decoder,
    Encoder,
    Gated,
    difference,
    made,
    mlp,
    tokens,
)

from ao_core import QTensor, config_from_json, config_to_json, load_model, quantize_, save_model
from ao_core.ext import ConfigError, GraphError
from ao_core.ext.numerics import hadamard_transform, has_hadamard
from ao_quant import (
    AWQConfig,
    GPTQConfig,
    Int4DynamicActivationInt4WeightConfig,
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    RotateConfig,
    SmoothQuantConfig,
)
from ao_quant.algorithms.rotating import random_rotation

INT4 = Int4DynamicActivationInt4WeightConfig(32)
MXFP4 = MXDynamicActivationMXWeightConfig("e2m1", "e2m1", "even")
NVFP4 = NVFP4DynamicActivationNVFP4WeightConfig()


def notes_of(report):
    return {record.fqn: record.note for record in report}


def inputs_of(model, module, data):
    """What a layer is called with."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    for batch in data:
        model(batch)
    handle.remove()
    return torch.cat(seen).flatten(0, -2)


def kurtosis(x):
    """Of each row, the fourth moment over the square of the second: 3 of a normal distribution."""
    return float((x.pow(4).mean(-1) / x.square().mean(-1).square()).mean())


#: of heads (64, 80), of residual streams (576, 896), and two that have no Hadamard matrix
@pytest.mark.parametrize("size", [64, 80, 576, 896, 172, 18])
@pytest.mark.parametrize("block", [None, 32])
def test_random_rotations_are_orthogonal(size, block):
    matrix = random_rotation(size, block, torch.Generator().manual_seed(1))
    eye = torch.eye(size, dtype=torch.float64)
    assert float((matrix @ matrix.T - eye).abs().max()) < 1e-12
    if block is None and has_hadamard(size):
        assert float((matrix.abs() - size**-0.5).abs().max()) < 1e-12
    if block is not None and size % block == 0:
        apart = matrix.view(size // block, block, size // block, block).abs().amax((1, 3))
        assert torch.equal(apart > 0, eye[: size // block, : size // block].bool())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [None, 16])
def test_the_model_computes_the_same(family, block):
    dense, data = made(FAMILIES[family], outlier=50.0), tokens()
    model = copy.deepcopy(dense)
    report = quantize_(model, RotateConfig(block=block), data=data)
    assert difference(model(data[0]), dense(data[0])) < 1e-5
    embedding = "embed.weight" if family == "encoder" else "embed_tokens.weight"
    old, new = (model_.get_parameter(embedding) for model_ in (dense, model))
    assert difference(new, old) > 0.5
    notes = notes_of(report)
    assert f"rotated with the residual stream of {WIDTH}" in notes["attn.q_proj.weight"]
    assert "rotated with each head of 8" in notes["attn.v_proj.weight"]
    assert notes["one.weight"] == "its gains moved into what reads the norm"
    gains = model.one.weight.detach() + getattr(model.one, "offset", 0.0)
    assert torch.equal(gains, torch.ones(WIDTH))


def test_a_head_that_was_tied_is_a_weight_of_its_own():
    dense, data = made(FAMILIES["gemma"]), tokens()
    model = copy.deepcopy(dense)
    report = quantize_(model, [RotateConfig(), INT4], data=data)
    assert model.lm_head.weight is not model.embed_tokens.weight
    assert "no longer tied to embed_tokens.weight" in notes_of(report)["lm_head.weight"]
    assert model.lm_head.weight.spec.dtype == "int8"
    kept = copy.deepcopy(dense)
    quantize_(kept, RotateConfig(residual=False), data=data)
    assert kept.lm_head.weight is kept.embed_tokens.weight


def test_outliers_are_gone():
    dense, data = made(Decoder), tokens()
    with torch.no_grad():
        dense.embed_tokens.weight[:, 3] *= 50
    model = copy.deepcopy(dense)
    quantize_(model, RotateConfig(online="none"), data=data)
    before, after = (kurtosis(inputs_of(m, m.attn.q_proj, data)) for m in (dense, model))
    assert before > 10
    assert after < 4


@pytest.mark.parametrize(
    ("config", "rounding", "gptq"), [(INT4, 0.9, 0.75), (MXFP4, 1.2, 0.9)], ids=["int4", "mxfp4"]
)
def test_four_bits_on_both_sides(config, rounding, gptq):
    """Rotation lowers the error where activations have outliers, that of MXFP4 with GPTQ only."""
    block, data = None if config is INT4 else 32, tokens(6)
    methods = {
        "rounding": [config],
        "gptq": [GPTQConfig(config)],
        "rotated": [RotateConfig(block=block), config],
        "rotated gptq": [RotateConfig(block=block), GPTQConfig(config)],
    }
    errors = dict.fromkeys(methods, 0.0)
    for seed in range(3):
        torch.manual_seed(seed)
        dense = made(Decoder, seed=seed)
        with torch.no_grad():
            dense.embed_tokens.weight[:, 3] *= 30
            dense.mlp.up_proj.weight[5] *= 30
        for name, configs in methods.items():
            model = copy.deepcopy(dense)
            quantize_(model, configs, data=None if name == "rounding" else data)
            errors[name] += difference(model(torch.cat(data)), dense(torch.cat(data)))
    assert 0 < errors["rotated"] < rounding * errors["rounding"]
    assert 0 < errors["rotated gptq"] < gptq * errors["gptq"]


def test_online_steps_are_of_the_weights_whose_inputs_nothing_rotates(tmp_path):
    dense, data = made(Decoder), tokens()
    model = copy.deepcopy(dense)
    report = quantize_(model, [RotateConfig(), GPTQConfig(INT4)], data=data)
    steps = {
        n: p.spec.input
        for n, p in model.named_parameters()
        if isinstance(p, QTensor) and p.spec.input
    }
    assert {name: str(*found) for name, found in steps.items()} == {
        "mlp.down_proj.weight": "hadamard(48)"
    }
    record = next(r for r in report if r.fqn == "mlp.down_proj.weight")
    assert record.error_vs_rtn < 1
    assert "its input is rotated online, in blocks of 48" in record.note
    x = inputs_of(model, model.mlp.down_proj, data)
    w = model.mlp.down_proj.weight
    expected = hadamard_transform(x, HIDDEN) @ hadamard_transform(w.dequantize(), HIDDEN).T
    torch.testing.assert_close(expected, x @ w.dequantize().T, rtol=1e-3, atol=1e-3)
    save_model(model, tmp_path)
    loaded = made(Decoder)
    load_model(loaded, tmp_path)
    assert torch.equal(loaded(data[0]), model(data[0]))


def test_which_inputs_are_rotated_online():
    data = tokens()
    for online, block, wanted in (
        (
            "all",
            16,
            {
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
                "lm_head",
            },
        ),
        (("*.down_proj", "attn.o_proj"), 16, {"down_proj", "o_proj"}),
    ):
        dense = made(Decoder)
        model = copy.deepcopy(dense)
        config = RotateConfig(residual=False, values=False, online=online, block=block)
        quantize_(model, [config, NVFP4], data=data)
        found = {
            name.split(".")[-2]
            for name, p in model.named_parameters()
            if isinstance(p, QTensor) and [str(step) for step in p.spec.input] == ["hadamard(16)"]
        }
        assert found == wanted
        assert 0 < difference(model(data[0]), dense(data[0])) < 0.5
    with pytest.raises(ConfigError, match=r"'\*\.nothing' matches no weight"):
        quantize_(made(Decoder), [RotateConfig(online=("*.nothing",)), INT4], data=data)


def test_the_same_seed_gives_the_same_rotation():
    data = tokens()
    models = [made(Decoder) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        quantize_(model, RotateConfig(seed=seed), data=data)
    first, again, other = (model.embed_tokens.weight for model in models)
    assert torch.equal(first, again)
    assert difference(other, first) > 0.5


@pytest.mark.parametrize(
    "before", [AWQConfig(), SmoothQuantConfig(), RotateConfig(), INT4, AWQConfig(INT4)]
)
def test_orders_that_make_no_sense(before):
    model = made(Decoder)
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"RotateConfig (after|changes weights)"):
        quantize_(model, [before, RotateConfig(), INT4], data=tokens())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_stacks_have_names():
    model, data = made(Decoder), tokens()
    report = quantize_(model, "rotate+gptq/w4a4", data=data)
    first, second = report.config["sequence"]
    assert (first["name"], second["name"]) == ("rotate", "gptq")
    assert second["args"]["base"]["name"] == "int4_dynamic_activation_int4_weight"
    assert str(*model.mlp.down_proj.weight.spec.input) == "hadamard(48)"
    with pytest.raises(ConfigError, match="AWQConfig"):
        quantize_(made(Decoder), "awq+rotate+gptq/w4a4", data=data)


def test_what_cannot_be_rotated_says_why():
    x = [torch.randn(4, WIDTH)]
    with pytest.raises(ConfigError, match=r"residual=True: no residual stream.*use residual=False"):
        quantize_(made(mlp), [RotateConfig(), INT4], data=x)
    model = made(Gated)
    report = quantize_(model, [RotateConfig(residual=False), INT4], data=x)
    assert "online, in blocks of 48" in notes_of(report)["down_proj.weight"]
    with pytest.raises(ConfigError, match="no channels were found that could be rotated"):
        quantize_(
            nn.Sequential(nn.Conv1d(2, 3, 1)),
            RotateConfig(residual=False),
            data=[torch.ones(1, 2, 4)],
        )

    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.sum().item() > 0)

    with pytest.raises(GraphError, match=r"torch\.export cannot trace Odd"):
        quantize_(Odd(4, 4), [RotateConfig(), INT4], data=[torch.ones(2, 4)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"online": "some"}, "online='some'.*'needed', 'all', 'none'"),
        ({"online": "none", "residual": False, "values": False}, "nothing would be rotated"),
        ({"block": 7}, "block=7: there is no such Hadamard matrix"),
    ],
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ConfigError, match=text):
        RotateConfig(**arguments)
    config = RotateConfig(online=("*.down_proj",), block=32)
    assert config_from_json(config_to_json(config)) == config


def test_layer_norms_keep_their_mean():
    """The mean that a LayerNorm subtracts is that of the channels as they were."""
    dense, data = made(Encoder), tokens()
    model = copy.deepcopy(dense)
    quantize_(model, RotateConfig(), data=data)
    means = [inputs_of(m, m.one, data).mean(-1) for m in (dense, model)]
    torch.testing.assert_close(means[1], means[0], rtol=1e-4, atol=1e-5)

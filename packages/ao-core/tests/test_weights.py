"""`WeightOnlyConfig`: any registered number format, in every kind of layer, without a package of configs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ao_core
import ao_core.dtypes
from ao_core import FqnToConfig, QTensor, Spec, WeightOnlyConfig
from ao_core.errors import ConfigError, UnknownNameError
from ao_core.registry import registry
from ao_core.weights import matrix_spec, weight_spec


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 24)
        self.conv = nn.Conv2d(4, 6, 3)
        self.linear = nn.Linear(24, 10)


@pytest.fixture
def model() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model()


@pytest.fixture
def mine() -> Iterator[str]:
    """A number format registered in this process."""
    ao_core.register(ao_core.lut_dtype("five_values", [-1.0, -0.5, 0.0, 0.5, 1.0]))
    yield "five_values"
    for store in (registry.dtypes._records, registry.dtypes._providers):
        store.pop("five_values")


def test_every_format_in_every_layer(model: Model) -> None:
    everything = lambda config: FqnToConfig({"embed": config, "*": config})  # noqa: E731
    for dtype in (dtype for dtype in registry.dtypes.values() if dtype.kind != "codebook"):
        copy = Model()
        copy.load_state_dict(model.state_dict())
        report = ao_core.quantize_(copy, everything(WeightOnlyConfig(dtype.name, 16)))
        done = report.with_status("changed")
        assert [record.fqn for record in done] == ["embed.weight", "conv.weight", "linear.weight"]
        for record in done:
            elements = torch.Size(record.shape).numel()
            # codes, float32 scales of groups of at least 12, and padding of whole rows
            assert record.bytes_after <= elements * (dtype.bits / 8 + 4 / 12) + 32
        assert copy.embed(torch.tensor([1, 2])).shape == (2, 24)
        assert copy.conv(torch.zeros(1, 4, 5, 5)).shape == (1, 6, 3, 3)
        assert copy.linear(torch.zeros(2, 24)).shape == (2, 10)


def test_a_format_of_ones_own(model: Model, mine: str) -> None:
    ao_core.quantize_(model, WeightOnlyConfig(mine, group_size=8, scale_dtype="bfloat16"))
    assert isinstance(model.linear.weight, QTensor)
    scale = model.linear.weight.scale.float()
    levels = (model.linear.weight.dequantize().reshape(10, 3, 8) / scale[..., None]).unique()
    torch.testing.assert_close(levels, torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]))


def test_zero_points_help_one_sided_weights(model: Model) -> None:
    with torch.no_grad():
        model.linear.weight.abs_()
    quality = {}
    for zero_point, dtype in (("none", "int4"), ("int", "uint4"), ("float", "uint4")):
        copy = Model()
        copy.load_state_dict(model.state_dict())
        report = ao_core.quantize_(copy, WeightOnlyConfig(dtype, "row", zero_point=zero_point))
        (record,) = [r for r in report if r.fqn == "linear.weight"]
        quality[zero_point] = record.sqnr_db or 0.0
    assert 20 < quality["none"] < quality["int"] < 35
    assert quality["int"] - 1 < quality["float"] < 35


def test_errors_name_the_parameter(model: Model) -> None:
    before = model.linear.weight
    with pytest.raises(UnknownNameError, match="Did you mean 'nf4'"):
        ao_core.quantize_(model, FqnToConfig({"conv": "weight_only", "*": WeightOnlyConfig("nf5")}))
    assert model.linear.weight is before
    assert not isinstance(model.conv.weight, QTensor)
    for size in (0, -4, True, "rows", 1.5):
        with pytest.raises(ConfigError, match="group_size="):
            WeightOnlyConfig(group_size=size)
    with pytest.raises(ConfigError, match="scale_dtype='float8'.*own"):
        WeightOnlyConfig(scale_dtype="float8")
    with pytest.raises(ConfigError, match="zero_point='yes'"):
        WeightOnlyConfig(zero_point="yes")
    with pytest.raises(ConfigError, match="zero_point='int' needs an integer format, not 'nf4'"):
        WeightOnlyConfig("nf4", zero_point="int").check()


def test_round_trips() -> None:
    config = WeightOnlyConfig("f6e3m2", 32, "bfloat16")
    assert ao_core.config_from_json(ao_core.config_to_json(config)) == config
    assert ao_core.resolve_config("weight_only") == WeightOnlyConfig()


def test_a_format_names_blocks_of_rows_packing_and_options() -> None:
    options = (("scale_rule", "absmean"),)
    spec = matrix_spec("ternary", 32, "float32", rows=8, layout="digits", options=options)
    assert spec == Spec("ternary", (8, 32), layout="digits", options=options)
    # filters have neither 2-D blocks nor rows to pack along
    conv = weight_spec(spec, (6, 4, 3, 3), conv=True)
    assert conv == Spec("ternary", (32,), layout="flat", options=options)


def test_the_rule_for_scales_reaches_every_layout() -> None:
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    for layout, block in (("packed", (1, 32)), ("digits", (1, 32)), ("flat", (32,))):
        spec = Spec("ternary", block, layout=layout, options=(("scale_rule", "absmean"),))
        scale = ao_core.quantize_tensor(x, spec).scale
        expected = x.abs().reshape(-1, 32).mean(1)
        torch.testing.assert_close(scale.flatten(), expected)
    spec = Spec("ternary", (1, 32), options=(("scale_rule", "median"),))
    with pytest.raises(ConfigError, match="scale_rule='median' is unknown"):
        ao_core.quantize_tensor(x, spec)


@pytest.mark.parametrize(
    "bad", [{"zero_point": "float"}, {"zero_point": "int"}, {"scale_dtype": "e8m0"}]
)
def test_learned_values_have_neither_zero_points_nor_powers_of_two(
    model: Model, bad: dict[str, str]
) -> None:
    ao_core.register(ao_core.dtypes.codebook_dtype("learned3", 3))
    try:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(
            ConfigError, match="learned3 has learned values in place of scales; use"
        ):
            ao_core.quantize_(model, WeightOnlyConfig("learned3", **bad))
        assert all(map(torch.equal, model.parameters(), before))
        report = ao_core.quantize_(model, WeightOnlyConfig("learned3"))
        assert len(report.with_status("changed")) == 2
    finally:
        for store in (registry.dtypes._records, registry.dtypes._providers):
            store.pop("learned3")

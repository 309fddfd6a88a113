"""Names and rules: many of them, of tied parameters, of compiled models, and formats in configurations."""

import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from ao_core import (
    Config,
    FqnToConfig,
    Spec,
    Transform,
    WeightOnlyConfig,
    config_from_json,
    config_to_json,
    quantize_,
)
from ao_core.errors import ConfigError
from ao_core.registry import registry
from ao_core.targets import decide

INT8, INT4 = WeightOnlyConfig("int8"), WeightOnlyConfig("int4", 32)


class Many(nn.Module):
    """As many parameters as the experts of a large model, each in a module of its own."""

    def __init__(self, count):
        super().__init__()
        self.experts = nn.ModuleList(nn.Module() for _ in range(count))
        for expert in self.experts:
            expert.weight = nn.Parameter(torch.empty(2, 2, device="meta"))


def test_time_is_linear_in_names():
    """44,000 entries, which took minutes when each parameter looked through all of them."""
    model = Many(44_000)
    rules = FqnToConfig({f"experts.{i}.weight": INT8 for i in range(44_000)})
    start = time.perf_counter()
    decisions = decide(model, rules, None)
    assert time.perf_counter() - start < 10
    assert len(decisions) == 44_000
    assert all(entry.config == INT8 for entry in decisions)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(64, 32)
        self.h = nn.Linear(32, 64, bias=False)
        self.h.weight = self.e.weight


@pytest.mark.parametrize(
    "entries",
    [
        {"e": INT8, "h": None},
        {"e.weight": INT8, "h": INT4},
        {"re:e.*": INT8, "re:h.*": INT4, "*": None},
    ],
)
def test_different_rules_for_a_tied_parameter(entries):
    model = Tied()
    weight = model.e.weight
    with pytest.raises(ConfigError, match=r"e\.weight and h\.weight are one parameter"):
        quantize_(model, FqnToConfig(entries))
    assert model.e.weight is model.h.weight is weight


@pytest.mark.parametrize(
    "entries",
    [{"e": INT8, "h": INT8}, {"h": INT8, "*": None}, {"h": INT8, "re:e.*": INT4}, {"re:.*": INT8}],
)
def test_rules_for_a_tied_parameter_that_agree(entries):
    """An exact name decides over regular expressions, and those over "*"."""
    (entry,) = decide(Tied(), FqnToConfig(entries), None)
    assert entry.config == INT8
    assert [owner.fqn for owner in entry.owners] == ["e.weight", "h.weight"]


@pytest.mark.parametrize("key", ["0", "0.weight", r"re:0\.weight", "_orig_mod.0.weight"])
def test_names_of_a_compiled_model_are_those_of_the_model(key):
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    decisions = decide(model, FqnToConfig({key: INT8, "*": None}), None)
    assert [entry.fqn for entry in decisions if entry.config] == ["_orig_mod.0.weight"]


def test_a_filter_sees_the_names_of_the_model():
    inner = nn.Sequential(nn.Linear(4, 4))
    inner[0] = torch.compile(inner[0])
    seen = []
    decide(torch.compile(inner), INT8, lambda module, name: seen.append(name) or True)
    assert set(seen) == {"0"}


@dataclass(frozen=True)
class WithSpec(Config):
    """A configuration of a plugin that has a format among its fields."""

    spec: Spec = field(default_factory=lambda: Spec("int8", (1, -1)))
    other: Spec | None = None


def test_a_spec_in_a_configuration_goes_through_json():
    record = Transform(WithSpec, "with_spec", 1, apply=lambda weight, config, target: weight)
    if "with_spec" not in registry.transforms:
        registry.add(record, provider="a test")
    act = Spec("int8", (1, -1))
    config = WithSpec(Spec("int4", (1, 32), "float16", "int", act=act, options=(("a", 1),)))
    assert config_from_json(config_to_json(config)) == config

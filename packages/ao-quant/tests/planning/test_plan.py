"""`plan`: within the budget on disk, the best there is, the same twice, and the model as it was."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import ao_quant
from ao_core import FqnToConfig, QTensor, quantize_, save_model
from ao_core.ext import ConfigError, MissingExtraError, QuantizationError, UnknownNameError
from ao_core.ext.calibration import answer
from ao_core.ext.saving import state_dict_to_flat
from ao_quant import (
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    QuantizationPlan,
)

#: bytes by which the bound on the size of the files of these models is off at most
SLACK = 150
FEW = ("int8_weight_only", "int4_weight_only", "intx_weight_only/2bit")


def plan(model, **arguments):
    """By the weights alone, unless the arguments say by what."""
    if not arguments.keys() & {"sample", "data", "measure", "max_kl"}:
        arguments["measure"] = "weight"
    return ao_quant.plan(model, **arguments)


def size_on_disk(model, folder):
    save_model(model, folder)
    return sum(file.stat().st_size for file in folder.glob("model*"))


def test_ten_random_budgets_hold_on_disk(model, tmp_path):
    dense = size_on_disk(model, tmp_path / "dense")
    rng = random.Random(0)
    smallest = plan(model, bits=3.3).bytes
    errors = []
    for budget in sorted(rng.randint(smallest, int(1.1 * dense)) for _ in range(10)):
        found = plan(model, budget=budget)
        quantized = copy.deepcopy(model)
        report = quantize_(quantized, found)
        size = size_on_disk(quantized, tmp_path / str(budget))
        assert size <= found.bytes <= budget
        # the bound knows neither which formats are used in the end nor where alignment pads
        assert found.bytes - size < SLACK
        chosen = {c.fqn: c.option.config for c in found.choices}
        done = {record.fqn for record in report.with_status("changed")}
        assert done == {fqn for fqn, config in chosen.items() if config is not None}
        errors.append(found.error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * max(errors[-1], 1e-9)


def test_as_good_as_trying_everything_on_disk(model, tmp_path):
    """Every combination of formats is saved, and its files are measured."""
    dense = plan(model, bits=32.0, candidates=FEW)
    assert {choice.option.config for choice in dense.choices} == {None}
    options = [choice.options for choice in dense.choices]
    assert [len(row) for row in options] == [4] * 4
    combinations = []
    for row in itertools.product(*options):
        quantized = copy.deepcopy(model)
        entries = {c.fqn: o.config for c, o in zip(dense.choices, row, strict=True)}
        quantize_(quantized, FqnToConfig({**entries, "*": None}))
        flat, metadata = state_dict_to_flat(quantized.state_dict())
        combinations.append((size_in_memory(flat, metadata), sum(o.error for o in row)))
    # that is what save_model writes, here for the last one
    assert combinations[-1][0] == size_on_disk(quantized, tmp_path)
    sizes = sorted(size for size, _ in combinations)
    rng = random.Random(1)
    for budget in [rng.randint(sizes[3], sizes[-1]) for _ in range(10)]:
        found = plan(model, budget=budget, candidates=FEW)
        best = min(error for size, error in combinations if size <= budget - SLACK)
        least = min(error for size, error in combinations if size <= budget)
        assert least <= found.error * (1 + 1e-12) <= 1.0001 * best, budget


def size_in_memory(flat, metadata):
    """Of a file with these tensors, with the checksums that `save_model` adds."""
    header = json.loads(metadata["ao"])
    header["crc32"] = dict.fromkeys(flat, "00000000")
    text = json.dumps(header, separators=(",", ":"))
    return len(safetensors.torch.save(flat, {**metadata, "ao": text, "ao_crc32": "00000000"}))


@pytest.mark.parametrize("bits", [2.9, 4.5, 7.0])
def test_bits_a_weight(model, bits):
    found = plan(model, bits=bits)
    assert 0.85 * bits < found.bits <= bits
    quantized = copy.deepcopy(model)
    quantize_(quantized, found)
    parameters = [quantized.get_parameter(choice.fqn) for choice in found.choices]
    # as in a file; a kernel's own layout may pad
    stored = sum(
        p.canonical().stored_bytes if isinstance(p, QTensor) else p.nbytes for p in parameters
    )
    weights = sum(parameter.numel() for parameter in parameters)
    assert 8 * stored / weights == pytest.approx(found.bits)


def test_sensitive_weights_get_more_bits(model):
    """The error of a weight with a heavy tail grows sooner, so it is given more."""
    found = plan(model, bits=4.5)
    bits = {c.fqn: 8 * c.option.data / model.get_parameter(c.fqn).numel() for c in found.choices}
    assert bits["up.weight"] > bits["down.weight"]


@pytest.mark.parametrize("measure", ["weight", "output", "kl"])
def test_measures(model, ids, measure):
    found = plan(model, bits=4.5, sample=ids, measure=measure)
    assert found.measure == measure
    assert found.measured is not None
    assert found.measured > 0
    by_bits = {choice.fqn: [o.error for o in choice.options] for choice in found.choices}
    for errors in by_bits.values():
        assert errors[0] == 0  # dense
        assert all(error > 0 for error in errors[1:])
        assert errors[-1] > 30 * errors[1]  # 2 bits beside 8
    if measure == "weight":
        assert plan(model, bits=4.5).choices == found.choices
    else:
        exact = answer(model, ids)
        quantized = copy.deepcopy(model)
        quantize_(quantized, found)
        other = quantized(ids).detach()
        if measure == "output":
            expected = (exact - other).square().sum() / exact.square().sum()
        else:
            p, q = exact.log_softmax(-1).double(), other.log_softmax(-1).double()
            expected = ((p.exp() * (p - q)).sum(-1) / torch.log(torch.tensor(2.0))).mean()
        assert found.measured == pytest.approx(float(expected), rel=2e-3)


def test_the_default_measure_follows_the_sample(model, ids):
    assert plan(model, bits=5.0).measure == "weight"
    assert plan(model, bits=5.0, sample=(ids,)).measure == "output"
    assert plan(model, bits=5.0, sample={"ids": ids}).measured is not None


def test_divergence_is_held_by_all_choices_together(model, ids):
    bytes_ = []
    for max_kl in (1e-6, 1e-4, 1e-2, 10.0):
        found = plan(model, max_kl=max_kl, sample=ids)
        assert found.goal == "max_kl"
        assert found.measured is not None
        assert found.measured <= max_kl
        bytes_.append(found.bytes)
    assert bytes_ == sorted(bytes_, reverse=True)
    assert bytes_[-1] < 0.3 * bytes_[0]
    assert {c.option.config for c in found.choices} == {ao_quant.IntxWeightOnlyConfig(2, 32)}
    none = plan(model, max_kl=1e-30, sample=ids)
    assert none.measured == 0.0
    assert all(choice.option.config is None for choice in none.choices)


def test_the_model_stays_as_it_was(model, ids):
    model.train()
    model.norm.eval()
    before = {
        name: (id(p), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()
    }
    modes = [module.training for module in model.modules()]
    seen = []
    plan(model, bits=5.0, sample=ids, progress=lambda *call: seen.append(call))
    assert [call[0] for call in seen] == [0, 1, 2, 3, 4]
    assert seen[0] == (0, 4, "embed.weight")
    assert [module.training for module in model.modules()] == modes
    for name, parameter in model.named_parameters():
        identity, value, grad = before[name]
        assert (id(parameter), parameter.requires_grad) == (identity, grad)
        assert torch.equal(parameter, value)
    assert model.head.weight is model.embed.weight

    class Broken(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if isinstance(self.inner.weight, QTensor):
                raise RuntimeError("no low precision here")
            return self.inner(x)

    broken = Broken(nn.Linear(8, 8))
    weight = broken.inner.weight
    with pytest.raises(RuntimeError, match="no low precision"):
        plan(broken, bits=4.5, sample=torch.zeros(1, 8))
    assert broken.inner.weight is weight
    assert broken.training


def test_ties_count_once_and_what_is_kept_is_listed(model):
    found = plan(model, bits=4.5)
    tied = next(c for c in found.choices if c.tied)
    assert (tied.fqn, tied.tied) == ("embed.weight", ("head.weight",))
    reasons = {kept.fqn: kept.reason for kept in found.kept}
    assert reasons.keys() == {"up.bias", "down.bias", "conv.bias", "norm.weight", "norm.bias"}
    assert "1 dimension(s)" in reasons["up.bias"]
    text = str(found)
    assert "embed.weight = head.weight" in text
    assert "as they are (5):" in text
    untied = type(model)()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    kept = {k.fqn: k.reason for k in plan(untied, bits=4.5).kept}
    assert "embeddings are kept" in kept["embed.weight"]
    with_embedding = plan(untied, bits=4.5, filter_fn=lambda module, name: True)
    assert "embed.weight" in {choice.fqn for choice in with_embedding.choices}


def test_what_a_format_cannot_hold_is_listed(model):
    dynamic = "int8_dynamic_activation_int8_weight"
    found = plan(model, bits=9.5, candidates=[dynamic, "int8_weight_only"])
    conv = next(choice for choice in found.choices if choice.fqn == "conv.weight")
    ((config, reason),) = conv.refused
    assert config == ao_quant.Int8DynamicActivationInt8WeightConfig()
    assert "filters of a convolution" in reason
    assert f"conv.weight in {dynamic}: it holds the filters" in str(found)
    # nothing can be done: it stays dense and is counted so
    only = plan(model, bits=30.0, candidates=[dynamic])
    conv = next(choice for choice in only.choices if choice.fqn == "conv.weight")
    assert conv.option.config is None
    assert conv.option.data == 4 * model.conv.weight.numel()


def test_what_is_quantized_already_is_kept(model, tmp_path):
    quantize_(model, ao_quant.NF4WeightOnlyConfig(), lambda module, name: name == "up")
    found = plan(model, bits=4.5)
    assert "quantized already" in {k.fqn: k.reason for k in found.kept}["up.weight"]
    quantize_(model, found)
    assert 0 <= found.bytes - size_on_disk(model, tmp_path) < 1000


def test_the_same_plan_twice_and_from_a_file(model, tmp_path):
    budget = 60_000
    first, second = plan(model, budget=budget), plan(model, budget="60 kB")
    assert first == second
    assert first.hash == second.hash
    assert len(first.hash) == 16
    assert plan(model, budget=59_000).hash != first.hash
    first.save(tmp_path / "plan.json")
    loaded = QuantizationPlan.load(tmp_path / "plan.json")
    assert loaded == first
    assert str(loaded) == str(first)
    assert quantize_(copy.deepcopy(model), loaded).config == quantize_(model, first).config
    text = first.to_json()
    with pytest.raises(ConfigError, match=r"hash='\w+' is not that of the plan"):
        QuantizationPlan.from_json(re.sub('"picked": [1-9]', '"picked": 0', text))
    with pytest.raises(ConfigError, match="not a plan in JSON"):
        QuantizationPlan.from_json(text[:-5])
    with pytest.raises(ConfigError, match="an object is expected"):
        QuantizationPlan.from_json("[]")
    with pytest.raises(ConfigError, match="ao_quant_plan=99"):
        QuantizationPlan.from_json(re.sub('"ao_quant_plan": [0-9]+', '"ao_quant_plan": 99', text))
    with pytest.raises(ConfigError, match=r"choices\[0\] lacks the field 'shape'"):
        QuantizationPlan.from_json(text.replace('"shape"', '"form"'))


def test_curve_and_plot(model, monkeypatch):
    found = plan(model, budget=60_000)
    sizes, errors = zip(*found.curve, strict=True)
    assert list(sizes) == sorted(sizes)
    assert list(errors) == sorted(errors, reverse=True)
    assert errors[-1] == 0
    assert sizes[0] <= found.bytes <= sizes[-1]
    figure = found.plot()
    (axes,) = figure.axes
    labels = [line.get_label() for line in axes.lines]
    assert labels[0] == "best plans"
    assert labels[-1] == "this plan"
    assert "int8_weight_only everywhere" in labels
    assert len(labels) == 2 + len(ao_quant.planning.CANDIDATES)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"ao-quant\[plan\]"):
        found.plot()


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can(model):
    with pytest.raises(ConfigError, match=r"the smallest .* is (\d+) bytes \(.* kB\)") as caught:
        plan(model, budget="2kB")
    smallest = int(str(caught.value).split(" can is ")[1].split()[0])
    found = plan(model, budget=smallest)
    assert found.bytes == smallest
    with pytest.raises(ConfigError, match="cannot be met"):
        plan(model, budget=smallest - 1)
    with pytest.raises(ConfigError, match=r"the smallest .* is 2.\d+ bits per weight") as caught:
        plan(model, bits=1.5)
    bits = float(str(caught.value).split(" can is ")[1].split()[0])
    assert plan(model, bits=bits).bits <= bits < 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of budget, bits, max_kl and tokens_per_second; found none"),
        ({"budget": "1MB", "bits": 4.0}, "found budget='1MB', bits=4.0"),
        ({"budget": "much"}, "budget='much': give positive bytes, or a size such as \"300MB\""),
        ({"budget": 0}, "budget=0"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"budget": True}, "budget=True"),
        ({"bits": -1.0}, "bits=-1.0: give a positive number"),
        ({"bits": float("nan")}, "bits=nan"),
        ({"bits": "4"}, "bits='4'"),
        ({"max_kl": 0.1}, "data=None: max_kl needs inputs"),
        ({"bits": 4.0, "measure": "kl"}, "data=None: measure='kl' needs inputs"),
        ({"bits": 4.0, "measure": "rank"}, "measure='rank' is unknown; use one of weight, layer"),
        ({"bits": 4.0, "candidates": []}, r"candidates=\[\]"),
        ({"bits": 4.0, "candidates": "int8_weight_only"}, "candidates='int8_weight_only'"),
        ({"max_kl": 1.0, "sample": torch.zeros(1), "measure": "output"}, "does not go with max_kl"),
    ],
)
def test_refusals(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan(model, **arguments)


@pytest.mark.parametrize("arguments", [{"bits": 4.75}, {"budget": "1MB"}])
def test_without_data_it_has_to_be_asked_for(model, arguments):
    with pytest.raises(ConfigError, match=r"data=None.* Pass data=.*measure='weight'"):
        ao_quant.plan(model, **arguments)
    assert ao_quant.plan(model, **arguments, measure="weight").choices


def test_a_model_that_is_quantized_already(model):
    quantize_(model, "int8_weight_only", lambda module, name: True)
    with pytest.raises(ConfigError, match=r"embed\.weight and 3 others are quantized already"):
        plan(model, bits=1.0)


def test_refusals_that_name_something_else(model, ids):
    nested = ao_quant.Int8WeightOnlyConfig()
    with pytest.raises(ConfigError, match="a FqnToConfig is a choice already"):
        plan(model, bits=4.0, candidates=[plan(model, bits=4.5, candidates=[nested, *FEW])])
    with pytest.raises(UnknownNameError, match="unknown recipe 'int9'"):
        plan(model, bits=4.0, candidates=["int9"])
    with pytest.raises(UnknownNameError, match="way to choose scales 'x'"):
        plan(model, bits=4.0, candidates=[Int4WeightOnlyConfig(scale_method="x")])
    with pytest.raises(ConfigError, match="the model answers it with a NoneType"):
        plan(nn.Sequential(nn.Linear(4, 4), Silent()), bits=9.0, sample=torch.zeros(1, 4))
    model.norm.weight.data[0] = torch.nan
    with pytest.raises(QuantizationError, match="answers the sample with NaN"):
        plan(model, bits=4.5, sample=ids)
    model.up.weight.data[0, 0] = torch.inf
    with pytest.raises(QuantizationError, match=r"up.weight has 1 NaN or inf"):
        plan(model, bits=4.5)


class Silent(nn.Module):
    def forward(self, x):
        return None


def test_methods_of_choosing_scales_are_candidates_too(model):
    candidates = [Int4WeightOnlyConfig(), Int4WeightOnlyConfig(scale_method="mse")]
    found = plan(model, bits=5.0, candidates=candidates)
    used = {choice.option.config for choice in found.choices}
    assert candidates[1] in used
    assert candidates[0] not in used
    same = plan(model, bits=9.5, candidates=[Int8WeightOnlyConfig(), "int8_weight_only"])
    assert [len(choice.options) for choice in same.choices] == [2] * 4


def test_a_model_without_weights_and_one_of_zeros():
    assert plan(nn.LayerNorm(8), bits=4.0).choices == ()
    zeros = nn.Linear(32, 32)
    nn.init.zeros_(zeros.weight)
    found = plan(zeros, bits=4.5, candidates=FEW)
    assert found.error == 0
    assert len(found.plot().axes) == 1

"""What cannot be pruned: errors that leave the model as it was, and reasons in the report."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import FqnToConfig, quantize_, weight_only
from ao_core.ext import ConfigError, QuantizationError
from ao_sparsity import (
    Blocks,
    Heads,
    NofM,
    Rows,
    Unstructured,
    prune_magnitude,
    prune_sparsegpt,
    prune_wanda,
    sensitivity,
)


def by_magnitude(model, data, pattern, **options):
    return prune_magnitude(model, pattern, **options)


ALL = pytest.mark.parametrize("method", [by_magnitude, prune_wanda, prune_sparsegpt])
WITH_DATA = pytest.mark.parametrize("method", [prune_wanda, prune_sparsegpt, sensitivity])


@ALL
def test_nan_weights(method, model, data):
    with torch.no_grad():
        model[2].weight[3, 5] = float("nan")
    with pytest.raises(QuantizationError, match=r"2\.weight has 1 NaN or inf"):
        method(model, data, NofM(2, 4))


@ALL
def test_quantized_weights(method, model, data):
    quantize_(model, FqnToConfig({"2": weight_only("int8"), "*": None}))
    with pytest.raises(QuantizationError, match=r"2\.weight is a QTensor; prune the dense model"):
        method(model, data, NofM(2, 4))
    found = method(model, data, NofM(2, 4), filter_fn=lambda module, name: name == "0")
    assert [r.fqn for r in found.report.with_status("pruned")] == ["0.weight"]


@ALL
def test_meta_weights(method, data):
    with pytest.raises(QuantizationError, match="meta device"):
        method(nn.Linear(52, 8, device="meta"), data, NofM(2, 4))


@ALL
@pytest.mark.parametrize("pattern", [0.5, "2:4", weight_only("int8")])
def test_what_is_no_pattern(method, pattern, model, data):
    with pytest.raises(ConfigError, match="need a pattern"):
        method(model, data, pattern)


@ALL
def test_names_that_match_nothing(method, model, data):
    with pytest.raises(ConfigError, match="'nowhere'"):
        method(model, data, FqnToConfig({"nowhere": NofM(2, 4)}))


@WITH_DATA
def test_missing_data(method, model, data):
    for missing in (None, [], torch.ones(3, 52), {"input": torch.ones(3, 52)}):
        with pytest.raises(ConfigError, match="needs calibration data"):
            method(model, missing, Unstructured(0.5))


@pytest.mark.parametrize("method", [prune_wanda, prune_sparsegpt])
def test_inputs_with_nan(method, model, data, same):
    unchanged = same(model.train())
    data[3][2, 7] = float("inf")
    with pytest.raises(QuantizationError, match=r"the inputs of 0\.weight have NaN or inf"):
        method(model, data, NofM(2, 4))
    unchanged()


def test_a_model_that_fails_halfway_is_as_it_was(model, data, same):
    """SparseGPT has pruned the first layer when the second meets an error."""
    unchanged = same(model)
    runs = 0

    def fail(module, args):
        nonlocal runs
        runs += 1
        if runs > 2 * len(data):
            assert bool((model[0].weight == 0).any())
            raise RuntimeError("broken")

    handle = model[2].register_forward_pre_hook(fail)
    with pytest.raises(ConfigError, match="data=.*RuntimeError: broken"):
        prune_sparsegpt(model, [*data, *data], NofM(2, 4))
    handle.remove()
    unchanged()


def test_too_small_for_the_pattern(data):
    model = nn.Sequential(nn.Linear(52, 3), nn.Linear(3, 10))
    for method in (by_magnitude, prune_wanda, prune_sparsegpt):
        (skipped,) = method(model, data, NofM(2, 4)).report.with_status("skipped")
        assert skipped.reason == "its rows of 3 are shorter than a group of 4"
    reasons = [
        [r.reason for r in prune_magnitude(model, pattern).report.with_status("skipped")]
        for pattern in (Blocks(0.5, size=(4, 4)), Heads(0.5, heads=4))
    ]
    assert reasons == [
        [
            "its 3×52 are smaller than a block of 4×4",
            "its 10×3 are smaller than a block of 4×4",
        ],
        ["its 3 columns do not divide by 4 heads"],
    ]
    layer = nn.Linear(4, 5)
    layer.weight = nn.Parameter(torch.empty(0, 4))
    empty = prune_magnitude(layer, Rows(0.5)).report
    assert empty.with_status("skipped")[0].reason == "it has no elements"


def test_what_has_no_known_inputs():
    model = nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.Flatten(), nn.Linear(60, 7))
    for method in (prune_wanda, prune_sparsegpt):
        report = method(model, [torch.randn(2, 4, 8)], NofM(2, 4), lambda m, n: True).report
        (skipped,) = report.with_status("skipped")
        assert skipped.fqn == "0.weight"
        assert skipped.reason == "the inputs of transposed convolutions are not observed"
        assert [r.fqn for r in report.with_status("pruned")] == ["2.weight"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, d: prune_magnitude(m, Unstructured(0.5), scope="all"), "scope='all'"),
        (lambda m, d: prune_magnitude(m, NofM(2, 4), scope="model"), "scope='model'"),
        (lambda m, d: prune_wanda(m, d, Rows(0.5)), "scope='row'"),
        (lambda m, d: prune_sparsegpt(m, d, Rows(0.5)), "pattern=rows 0.5"),
        (lambda m, d: prune_sparsegpt(m, d, NofM(2, 4), block=6), "block=6"),
        (lambda m, d: prune_sparsegpt(m, d, NofM(2, 4), damping=0), "damping=0"),
        (lambda m, d: prune_sparsegpt(m, d, NofM(2, 4), damping=float("nan")), "damping=nan"),
    ],
)
def test_arguments_that_contradict(call, message, model, data, same):
    unchanged = same(model)
    with pytest.raises(ConfigError, match=message):
        call(model, data)
    unchanged()

"""Number formats of dense values, without a scale: exact, and in layouts of whole elements."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import Spec, quantize_, quantize_tensor
from ao_core.errors import ConfigError, QuantizationError, UnknownNameError
from ao_core.recipes import WeightOnlyConfig
from ao_core.spec import NO_SCALE, WHOLE

ROW = (1, WHOLE)
STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("name", STORAGE)
def test_codes_are_the_values(name):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[0] = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 3e38, -3e38, 1.0])
    q = quantize_tensor(x, Spec(name, ROW, NO_SCALE))
    assert q.part_names == ("qdata",)
    greatest = torch.finfo(STORAGE[name]).max
    expected = x.clamp(-greatest, greatest).to(STORAGE[name])
    assert q.qdata.dtype == STORAGE[name]
    assert torch.equal(q.qdata.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(q.dequantize(), expected.float())
    assert q.stored_bytes == x.numel() * STORAGE[name].itemsize
    assert q.sparsity is None
    assert str(q.spec) == f"{name} plain"
    assert Spec.from_dict(q.spec.to_dict()) == q.spec


def test_large_tensors_are_cut_into_slabs():
    x = torch.randn(1025, 4099, generator=torch.Generator().manual_seed(0))
    q = quantize_tensor(x, Spec("bf16", ROW, NO_SCALE))
    assert torch.equal(q.dequantize(torch.bfloat16), x.bfloat16())


def test_a_scale_is_had_by_all_formats_or_none():
    x = torch.ones(4, 8)
    with pytest.raises(ConfigError, match="'bf16', of kind 'dense'"):
        quantize_tensor(x, Spec("bf16", ROW))
    with pytest.raises(ConfigError, match="scale_dtype='none' with 'int8'"):
        quantize_tensor(x, Spec("int8", ROW, NO_SCALE))
    with pytest.raises(ConfigError, match="use zero_point='none'"):
        Spec("bf16", ROW, NO_SCALE, zero_point="int")
    with pytest.raises(QuantizationError, match="kind 'dense'"):
        quantize_tensor(x, Spec("bf16", ROW, NO_SCALE), scale_method="mse")


@pytest.mark.parametrize(("layout", "block"), [("packed", ROW), ("digits", ROW), ("flat", (32,))])
def test_wide_codes_are_not_packed(layout, block):
    with pytest.raises(QuantizationError, match="use the layout 'plain'"):
        quantize_tensor(torch.ones(4, 8), Spec("fp32", block, NO_SCALE, layout=layout))


def test_configurations():
    for name in STORAGE:
        layer = nn.Sequential(nn.Linear(12, 6), nn.Conv2d(4, 6, 3)).double()
        report = quantize_(layer, WeightOnlyConfig(name, group_size=4))
        assert [r.spec for r in report.with_status("changed")] == [f"{name} plain"] * 2
    layer = nn.Sequential(nn.Conv2d(4, 6, 3))
    report = quantize_(layer, WeightOnlyConfig("int4", 4, layout="packed"))
    (skipped,) = report.with_status("skipped")
    assert "'packed' is for matrices" in skipped.reason


@pytest.mark.parametrize(
    ("config", "error", "reason"),
    [
        (WeightOnlyConfig("bf16", scale_dtype="float32"), ConfigError, "has no scale"),
        (WeightOnlyConfig("bf16", scale_method="mse"), ConfigError, "has no scale"),
        (WeightOnlyConfig("int8", layout="nonesuch"), UnknownNameError, "nonesuch"),
    ],
)
def test_configurations_that_cannot_work(config, error, reason):
    with pytest.raises(error, match=reason):
        quantize_(nn.Linear(8, 8), config)

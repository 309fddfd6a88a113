"""`scale_method=`: how a tensor, a format and a configuration name the way their scales are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import ao_core
from ao_core import ScaleMethod, Spec, WeightOnlyConfig, quantize_, quantize_tensor
from ao_core.errors import QuantizationError, UnknownNameError
from ao_core.numerics import choose_qparams, sqnr
from ao_core.registry import registry
from ao_core.scales import mse_qparams
from ao_core.spec import WHOLE


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(12, 96, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def halved() -> Iterator[str]:
    """A way to choose scales registered in this process: half of what absmax gives."""

    def choose(x, dtype, spec):
        scale, zero_point = choose_qparams(x, dtype, spec.block, spec.zero_point, spec.scale_dtype)
        return scale * 0.5, zero_point

    ao_core.register(ScaleMethod("halved", choose, "half"))
    yield "halved"
    for store in (registry.scale_methods._records, registry.scale_methods._providers):
        store.pop("halved")


def test_absmax_is_the_default_and_what_kernels_do(x):
    spec = Spec("int4", (1, 32), layout="packed")
    default, named = quantize_tensor(x, spec), quantize_tensor(x, spec, scale_method="absmax")
    assert all(torch.equal(default.parts[n], named.parts[n]) for n in default.part_names)
    scale, _ = choose_qparams(x, registry.dtypes.get("int4"), (1, 32))
    assert torch.equal(default.scale, scale)


@pytest.mark.parametrize("layout", ["plain", "packed", "flat"])
@pytest.mark.parametrize("scale_method", ["mse", "hqq"])
def test_every_layout_takes_what_was_chosen(x, layout, scale_method):
    block = (32,) if layout == "flat" else (1, 32)
    spec = Spec("uint3", block, "bfloat16", "int", layout)
    found = quantize_tensor(x, spec, scale_method=scale_method)
    assert found.spec == spec
    assert found.scale.dtype == torch.bfloat16
    assert (
        0.3
        < float(sqnr(x, found.dequantize()) - sqnr(x, quantize_tensor(x, spec).dequantize()))
        < 3
    )
    if layout != "flat":
        assert torch.equal(found.scale.flatten(), quantize_tensor(x.reshape(-1, 32), Spec(
            "uint3", (1, WHOLE), "bfloat16", "int"), scale_method=scale_method).scale.flatten())  # fmt: skip


def test_scales_that_are_quantized_themselves(x):
    x[3] = 0.0
    spec = Spec("nf4", (1, 32), Spec("f8e4m3", (WHOLE, WHOLE)), layout="packed")
    absmax, mse = (quantize_tensor(x, spec, scale_method=name) for name in ("absmax", "mse"))
    assert 0.1 < float(sqnr(x, mse.dequantize()) - sqnr(x, absmax.dequantize())) < 2
    assert (mse.dequantize()[3] == 0).all()


def test_given_scales_are_taken_as_they_are(x):
    scale = torch.full((12, 1), 0.1)
    given = quantize_tensor(x, Spec("int4", (1, WHOLE)), scale=scale, scale_method="mse")
    assert torch.equal(given.scale, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero_point", ["none", "int"])
def test_models(dtype, zero_point):
    """Better in the report too; biases and everything else as ever."""
    fmt = "int2" if zero_point == "none" else "uint2"
    found = {}
    for scale_method in ("absmax", "mse", "hqq"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, 60), nn.Conv2d(4, 6, 3)).to(dtype)
        report = quantize_(model, WeightOnlyConfig(fmt, 64, "bfloat16", zero_point, scale_method))
        found[scale_method] = [r.sqnr_db for r in report.with_status("changed")]
        assert len(found[scale_method]) == 2
        assert report.config["args"]["scale_method"] == scale_method
    for i in range(2):
        assert found["mse"][i] > found["absmax"][i] + 0.1
        assert found["hqq"][i] > found["absmax"][i] + 0.1


def test_one_of_your_own(x, halved):
    spec = Spec("int4", (1, 32))
    mine = quantize_tensor(x, spec, scale_method=halved)
    assert torch.equal(mine.scale, quantize_tensor(x, spec).scale * 0.5)
    model = nn.Linear(64, 8)
    quantize_(model, WeightOnlyConfig("int4", 32, scale_method=halved))
    assert registry.scale_methods.provider(halved) == "in-process"


def test_formats_without_scales_to_choose(x, monkeypatch):
    other = replace(registry.dtypes.get("int4"), name="learned", kind="codebook")
    monkeypatch.setitem(registry.dtypes._records, "learned", other)
    spec = Spec("learned", (1, 32), layout="packed")
    with pytest.raises(QuantizationError, match="'learned' is of kind 'codebook': use 'absmax'"):
        quantize_tensor(x, spec, scale_method="hqq")
    assert quantize_tensor(x, spec).spec == spec


def test_what_is_built_in():
    names = [name for name, method in registry.scale_methods.items() if method.summary]
    assert names[:3] == ["absmax", "mse", "hqq"]
    assert registry.scale_methods.get("mse").choose is mse_qparams


def test_refusals(x):
    with pytest.raises(UnknownNameError, match=r"way to choose scales 'mes'. Did you mean 'mse'"):
        quantize_tensor(x, Spec("int4", (1, 32)), scale_method="mes")
    model = nn.Linear(8, 8)
    before = model.weight
    with pytest.raises(UnknownNameError, match="Known: absmax, hqq, mse"):
        quantize_(model, WeightOnlyConfig("int4", scale_method="gptq"))
    assert model.weight is before
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with pytest.raises(QuantizationError, match="1 NaN or inf values of 64"):
        quantize_(model, WeightOnlyConfig("int4", scale_method="mse"))
    assert model.weight is before

"""Scales by the importance of columns: for formats of every kind, and against the best that there is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ao_core import Spec, quantize_
from ao_core.ext import registry
from ao_core.ext.numerics import learn_codebooks
from ao_quant.algorithms.importance import weighted_qparams
from ao_quant.configs import GGUF_TYPES, GPTQConfig, ImatrixConfig
from ao_quant.configs.gguf import gguf_spec
from ao_quant.gguf.encode import WEIGHABLE, encode


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def data():
    """Correlated inputs of 512 channels, some of which are large."""
    mix = torch.eye(512) + normal(512, 512, seed=1) / 8
    mix[:, ::7] *= 6
    return [normal(600, 512, seed=2) @ mix]


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 48, bias=False)).eval()


NAMES = [
    "int4-g128", "int2-g64", "nf4", "fp4_weight_only", "codebook_weight_only", "nvfp4", "w8a8",
    "q4_1", "q2_k", "q4_k", "q6_k", "iq4_nl",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gains_and_gptq_gains_more(layer, name):
    errors = []
    for config in (ImatrixConfig(name), GPTQConfig(name)):
        made = copy.deepcopy(layer)
        record = quantize_(made, config, data=data()).records[0]
        errors.append(record.error_vs_rtn)
    assert 0.3 < errors[0] < 0.97
    assert 0.05 < errors[1] < 0.6 * errors[0]


def test_gguf_types_that_can_be_weighted_are_all_but_the_exact_one():
    assert set(WEIGHABLE) == set(GGUF_TYPES) - {"q8_0"}


@pytest.mark.parametrize(
    "spec",
    [
        Spec("int4", (1, 16)),
        Spec("uint3", (1, 16), "float32", "int"),
        Spec("nf4", (1, 16)),
        Spec("f4e2m1", (1, 16), "e8m0"),
    ],
    ids=str,
)
def test_scales_are_near_the_best_of_a_fine_search(spec):
    """In float64, over 400 ranges of each block, both ends of which move."""
    x, by = normal(24, 16, seed=3), normal(24, 16, seed=4).exp()
    dtype = registry.dtypes.get(spec.dtype)

    def error(scale, zero):
        zero = 0 if zero is None else zero.double()
        ratio = x.double() / scale.double() + zero
        values = dtype.decode(dtype.encode(ratio.float())).double()
        return (((values - zero) * scale.double() - x) ** 2 * by).sum(1)

    found = error(*weighted_qparams(x, by, dtype, spec))
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    best = torch.full_like(found, torch.inf)
    steps = torch.linspace(0.3, 1.2, 20).tolist()
    for a in steps:
        for b in steps if spec.zero_point != "none" else [a]:
            if spec.zero_point == "none":
                scale, zero = torch.maximum(high, -low) * a / dtype.max, None
                if spec.scale_dtype == "e8m0":
                    scale = 2.0 ** scale.log2().round()
            else:
                scale = (high * b - low * a) / dtype.max
                zero = (-low * a / scale).round()
            best = torch.minimum(best, error(scale, zero))
    assert 0.7 < float(found.sum() / best.sum()) < 1.06


@pytest.mark.parametrize("kind", ["q4_0", "iq4_nl", "q4_1"])
def test_the_weighted_search_of_gguf_is_near_the_best(kind):
    """Blocks of 32 with the weights of llama.cpp, over 4000 scales (and minima) of each block."""
    x, by = normal(6, 32, seed=5), normal(6, 32, seed=6).exp()
    factor = WEIGHABLE[kind] * x.square().mean(1, keepdim=True)
    weights = (by * (factor + x.square()).sqrt()).double()
    q = encode(kind, x, gguf_spec(kind), by)
    dtype = registry.dtypes.get(q.spec.dtype)
    found = ((q.dequantize().double() - x) ** 2 * weights).sum()
    best = torch.full((6,), torch.inf, dtype=torch.float64)
    span = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    for a in torch.linspace(0.5, 1.2, 80).tolist():
        for b in torch.linspace(0.8, 1.2, 40).tolist() if kind == "q4_1" else (1.0, -1.0):
            if kind == "q4_1":
                scale, low = span * a / 15, -x.amin(1, keepdim=True) * b
            else:
                scale, low = x.abs().amax(1, keepdim=True) * a * b / dtype.max, 0.0
            scale = scale.half().float()
            values = dtype.decode(dtype.encode((x + low) / scale)) * scale - low
            best = torch.minimum(best, ((values.double() - x) ** 2 * weights).sum(1))
    assert 0.8 < float(found / best.sum()) < 1.04


def test_codebooks_are_never_worse_for_what_counts():
    x, by = normal(5, 200, seed=7), normal(5, 200, seed=8).mul(2).exp()

    def error(tables):
        distances = (x[:, :, None] - tables[:, None]).abs().amin(-1)
        return (distances.double() ** 2 * by).sum(1)

    plain, weighted = (
        error(learn_codebooks(x, (1, -1), 3, each).view(5, 8)) for each in (None, by)
    )
    assert bool((weighted <= plain * (1 + 1e-6)).all())
    assert float(weighted.sum()) < 0.9 * float(plain.sum())
    even = learn_codebooks(x, (1, -1), 3, torch.ones_like(x))
    assert float(error(even.view(5, 8)).sum()) <= float(plain.sum()) * (1 + 1e-6)


def test_columns_that_were_never_used_keep_their_scales(layer):
    made, plain = copy.deepcopy(layer), copy.deepcopy(layer)
    quantize_(plain, "int4-g128")
    x = data()[0]
    x[:, 128:256] = 0
    quantize_(made, ImatrixConfig("int4-g128"), data=[x])
    weights = [model[0].weight.dequantize()[:, 128:256] for model in (made, plain)]
    dense = layer[0].weight[:, 128:256].detach()
    errors = [float((each - dense).square().mean()) for each in weights]
    assert errors[0] < 1.05 * errors[1]

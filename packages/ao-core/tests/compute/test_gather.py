"""Weights that FSDP2 gathers as codes: which casts allow it, and matmuls of the codes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ao_core import WHOLE, ComputeWeight, Spec
from ao_core.compute import Matmuls
from ao_core.compute.gather import (
    FLOAT8_ALL_GATHER,
    all_reduce_max,
    cast_shard,
    shared_cast,
    with_float8_all_gather,
)
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.numerics import sqnr
from ao_core.tensor import quantize_tensor
from ao_core.testing.base import gaussian, same_bits

TENSOR, ROW, COLUMN = (WHOLE, WHOLE), (1, WHOLE), (WHOLE, 1)


def specs(weight: Spec, act: Spec, back: tuple[int, ...] | None = None) -> Matmuls:
    backward = replace(weight, block=weight.block[::-1] if back is None else back)
    gradient = replace(act, dtype="f8e5m2" if act.dtype == "f8e4m3" else act.dtype)
    return Matmuls(
        replace(weight, act=act),
        replace(backward, act=gradient),
        replace(act, act=gradient),
    )


def alike(dtype: str, block: tuple[int, ...], act: tuple[int, ...], **fields: Any) -> Matmuls:
    return specs(Spec(dtype, block, **fields), Spec(dtype, act))


CASES = {
    "tensorwise": alike("f8e4m3", TENSOR, TENSOR),
    "tensorwise-powers": alike("f8e4m3", TENSOR, TENSOR, scale_dtype="e8m0"),
    "squares": alike("f8e4m3", (16, 16), ROW),
    "rows": alike("f8e4m3", ROW, ROW),
    "int8-tensor": alike("int8", TENSOR, ROW),
    "ternary-like": alike("int4", (16, 16), ROW),
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_matmuls_of_codes_are_those_of_the_memory(given: Matmuls, dtype: torch.dtype) -> None:
    """A weight that is cast once has the matmuls of one that is cast for each."""
    cast = shared_cast(given.output, given.grad_input)
    assert cast is not None
    dense = (gaussian((33, 70)) / 8).to(dtype)
    results = []
    for held in (dense, quantize_tensor(dense, cast)):
        layer = nn.Linear(70, 33, bias=False)
        layer.weight = nn.Parameter(ComputeWeight(held, *with_float8_all_gather(given)))
        x = gaussian((2, 5, 70), seed=1).to(dtype).requires_grad_()
        out = layer(x)
        (out * gaussian(out.shape, seed=2).to(dtype)).sum().backward()
        with torch.inference_mode():
            assert same_bits(layer(x), out)
        results.append((out.detach(), x.grad, layer.weight.grad))
    for expected, actual in zip(*results, strict=True):
        assert expected is not None
        assert type(actual) is Tensor
        assert float(sqnr(expected, actual)) > (100 if dtype == torch.float32 else 40)


@pytest.mark.slow
def test_matmuls_of_codes_compile() -> None:
    given = CASES["tensorwise"]
    weight = quantize_tensor(gaussian((33, 70)), Spec("f8e4m3", TENSOR))
    layer = nn.Linear(70, 33)
    layer.weight = nn.Parameter(ComputeWeight(weight, *given))
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    results: list[list[Tensor | None]] = []
    for each in (layer, compiled):
        x = gaussian((5, 70), seed=1).requires_grad_()
        each(x).square().sum().backward()
        results.append([x.grad, each.get_parameter("weight").grad])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()


def test_the_format_of_the_gathered_weight() -> None:
    given = with_float8_all_gather(CASES["squares"])
    assert given[0] is not None
    assert given[0].option(FLOAT8_ALL_GATHER, False) is True
    assert given[1:] == CASES["squares"][1:]
    assert shared_cast(given.output, given.grad_input) == Spec("f8e4m3", (16, 16))
    # how a matmul is added up is nothing of the cast
    fast = replace(Spec("int8", TENSOR), options=(("fast_accum", False),))
    assert shared_cast(Spec("int8", TENSOR), fast) == Spec("int8", TENSOR)
    # a vector of scales stays one, whichever way the matrix lies
    assert shared_cast(Spec("int8", (WHOLE,)), Spec("int8", COLUMN)) == Spec("int8", ROW)
    assert shared_cast(Spec("int8", ROW), Spec("int8", ROW)) is None
    assert shared_cast(Spec("int8", TENSOR), Spec("int4", TENSOR)) is None
    assert shared_cast(None, Spec("int8", TENSOR)) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (specs(Spec("f8e4m3", ROW), Spec("f8e4m3", ROW), ROW), "each other's transpose"),
        (Matmuls(Spec("f8e4m3", TENSOR)), "each other's transpose"),
        (Matmuls(), "each other's transpose"),
        (alike("uint8", TENSOR, TENSOR, zero_point="int"), "symmetric"),
        (alike("int4", TENSOR, TENSOR, options=(("scale_rule", "absmean"),)), "absmean"),
    ],
    ids=["rowwise", "gradient-in-high-precision", "high-precision", "zero-points", "mean"],
)
def test_casts_that_cannot_be_gathered(given: Matmuls, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        with_float8_all_gather(given)


def test_other_operations_on_codes_are_refused() -> None:
    held = quantize_tensor(gaussian((33, 70)), Spec("f8e4m3", TENSOR))
    weight = ComputeWeight(held, *CASES["tensorwise"])
    with pytest.raises(UnsupportedOp, match=FLOAT8_ALL_GATHER):
        nn.functional.embedding(torch.arange(3), weight)


def test_the_dtype_of_codes_changes_below_autograd() -> None:
    held = quantize_tensor(gaussian((33, 70)), Spec("f8e4m3", TENSOR))
    half = torch.ops.aten.to.dtype(held, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.dequantize(torch.float32), held.dequantize())
    with torch._C._AutoDispatchBelowAutograd():
        assert held.to(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["floor", "rceil"])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "e8m0"])
def test_shards_are_cast_as_the_whole(scale_dtype: str, mode: str) -> None:
    options = (("mx_mode", mode),)
    spec = Spec("f8e4m3", TENSOR, scale_dtype, options=options)
    whole = gaussian((33, 70))
    whole[5] *= 40
    largest = whole.abs().amax().reshape(1, 1)
    expected = quantize_tensor(whole, spec)
    for start, end in ((0, 17), (17, 33), (33, 33)):
        codes = cast_shard(whole[start:end], spec, largest)
        assert same_bits(codes.qdata.view(torch.uint8), expected.qdata[start:end].view(torch.uint8))
        assert same_bits(codes.scale, expected.scale)


def test_nan_is_the_greatest() -> None:
    values = torch.tensor([0.0, 1e-40, 3.0, torch.inf, torch.nan])
    assert same_bits(all_reduce_max(values, []), values)
    bits = values.view(torch.int32)
    assert bits.tolist() == sorted(bits.tolist())


def test_a_layer_that_arrives_as_addmm() -> None:
    given = CASES["tensorwise"]
    weight, bias = ComputeWeight(gaussian((33, 70)), *given), gaussian((33,), seed=3)
    x = gaussian((5, 70), seed=1)
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(torch.addmm(bias, x, weight.t()), expected)
    assert float(sqnr(x @ weight.memory.t() + bias, expected)) < 40

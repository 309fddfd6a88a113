"""Which matmuls the kernels for two quantized operands take; their numbers are in proofs/interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import registry
from ao_kernels.triton.scaled_mm.launch import TILE_CONFIGS, aligned, tile_config_of

TENSOR, ROW, GROUP, SQUARE = (WHOLE, WHOLE), (1, WHOLE), (1, 128), (128, 128)


def spec(a="f8e4m3", b="f8e4m3", blocks=(ROW, ROW), **act):
    return Spec(b, blocks[1], act=Spec(a, blocks[0], **act))


def reason(op, found, numbers="float8", shape=(48, 64), x=(20, 64), dtype=torch.bfloat16):
    kernel = registry.kernels.get(f"triton_{numbers}_{op}")
    return kernel.refuses(Call(op, found, shape, x, dtype, "cuda"))


FLOAT8 = [
    spec(),
    spec("f8e5m2"),
    spec("f8e5m2", "f8e5m2"),
    spec(blocks=(TENSOR, ROW), static=True),
    spec(blocks=(GROUP, SQUARE)),
    spec(blocks=(GROUP, GROUP)),
    spec(scale_dtype="e8m0"),
]


@pytest.mark.parametrize("found", FLOAT8, ids=str)
@pytest.mark.parametrize("op", ["linear", "mm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float8(found, op, dtype):
    assert reason(op, found, dtype=dtype) is None
    assert reason(op, found, shape=(33, 7), x=(2, 3, 7), dtype=dtype) is None


def test_one_scale_a_tensor_is_left_to_torch_where_it_can():
    found = spec(blocks=(TENSOR, TENSOR))
    assert "cuBLAS" in reason("mm", found)
    assert "cuBLAS" in reason("linear", found)
    assert reason("mm", found, dtype=torch.float16) is None
    assert reason("linear", found, shape=(33, 7), x=(20, 7)) is None


@pytest.mark.parametrize(
    ("found", "changes", "words"),
    [
        (Spec("f8e4m3", ROW), {}, "both operands in float8"),
        (spec("int8"), {}, "both operands in float8"),
        (spec(zero_point="float"), {}, "no zero points"),
        (spec(blocks=(ROW, SQUARE)), {}, "beside 128 × 128"),
        (spec(blocks=((1, 32), (1, 32))), {}, "found f8e4m3[1×32]"),
        (spec(scale_dtype=Spec("f8e4m3", TENSOR)), {}, "not quantized themselves"),
        (spec(), {"dtype": torch.float64}, "not torch.float64"),
        (spec(), {"x": (0, 64)}, "not empty"),
        (spec(), {"shape": (0, 64)}, "not empty"),
    ],
)
def test_float8_that_is_refused(found, changes, words):
    assert words in reason("mm", found, **changes)


def test_integers():
    symmetric, zero_point = spec("int8", "int8"), spec("uint8", "int8", zero_point="int")
    for found in (symmetric, zero_point, replace(symmetric, block=TENSOR)):
        assert reason("linear", found, "int8") is None
        assert reason("mm", found, "int8") is None
    assert "in uint8 with zero points" in reason("mm", spec("uint8", "int8"), "int8")
    assert "in uint8 with zero points" in reason("mm", Spec("int8", ROW), "int8")
    assert "weights in int8" in reason("mm", spec("int8", "f8e4m3"), "int8")
    assert "whole rows" in reason("mm", spec("int8", "int8", (GROUP, SQUARE)), "int8")


@pytest.mark.parametrize("numbers", ["float8", "int8"])
def test_experts(numbers):
    name = "int8" if numbers == "int8" else "f8e4m3"
    sizes = {"numbers": numbers, "shape": (5, 48, 64)}
    assert reason("grouped_mm", spec(name, name), **sizes) is None
    assert reason("grouped_linear", spec(name, name), **sizes, x=(5, 20, 64)) is None
    by_rows = reason("grouped_mm", spec(name, name), numbers, shape=(48, 64))
    assert "contracted dimension" in by_rows
    static = spec(name, name, (TENSOR, ROW), static=True)
    assert "depend on the expert" in reason("grouped_linear", static, **sizes)
    whole = spec(name, name, (ROW, TENSOR))
    assert "128 × 128" in reason("grouped_mm", whole, **sizes)


def test_grouped_blocks_are_squares():
    sizes = {"shape": (5, 48, 64)}
    assert reason("grouped_mm", spec(blocks=(GROUP, SQUARE)), **sizes) is None
    assert "scales of rows" in reason("grouped_mm", spec(blocks=(GROUP, GROUP)), **sizes)


@pytest.mark.parametrize(
    ("m", "n", "experts", "largest", "tile"),
    [
        (16, 4096, 1, True, (64, 32)),  # 128 blocks stream the weights
        (16, 28672, 1, True, (64, 128)),
        (128, 4096, 1, True, (64, 128)),
        (4096, 4096, 1, True, (128, 256)),
        (1024, 4096, 1, True, (128, 256)),  # 128 blocks, at once
        (4096, 4096, 1, False, (128, 128)),
        (4, 4096, 64, True, (64, 128)),
        (512, 2048, 16, True, (128, 256)),
    ],
)
def test_regimes(m, n, experts, largest, tile):
    assert tile_config_of(m, n, experts, 132, largest=largest)[:2] == tile
    assert len(TILE_CONFIGS) <= 4


def test_rows_that_begin_anywhere():
    codes = torch.arange(70, dtype=torch.uint8).view(7, 10).view(torch.int8)
    found = aligned(codes)
    assert found.stride() == (16, 1)
    assert torch.equal(found, codes)
    assert torch.equal(aligned(codes.t()), codes.t())
    whole = torch.zeros(4, 32, dtype=torch.float8_e4m3fn)
    assert aligned(whole) is whole
    assert aligned(whole[:, 1:17]).data_ptr() % 16 == 0

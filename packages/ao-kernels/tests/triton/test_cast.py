"""The assembly of the casts to float8, and what they refuse; their numbers are in proofs/interpreted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import ConfigError, UnsupportedOp, registry
from ao_kernels.triton.cast.op import cast_dual
from ao_kernels.triton.shared.ptx import divide, pack_float8, refine, round_pair
from ao_triton_checks.asm import run

KERNEL = registry.kernels.get("triton_quantize_plain")
_GRID = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def words(values):
    return np.asarray(values, np.float32).view(np.uint32)


def quotients(x, scale, off=0, saturating=True, sm80=False):
    """What a kernel computes of x / scale, from a reciprocal that is `off` places beside the nearest."""
    near = (np.float32(1) / scale).view(np.uint32) + np.uint32(off & 0xFFFFFFFF)
    (inverse,) = run(refine(), near, words(scale))
    text = divide(saturating=saturating, sm80=sm80)
    (found,) = run(text, words(x), words(scale), inverse)
    return found.view(np.float32)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_quotients_are_those_of_division(off):
    """Also beside the middles between two numbers of float8, where an error would be another code."""
    random = np.random.default_rng(off + 1)
    scale = np.exp2(random.uniform(-86, 100, 400_000)).astype(np.float32)
    ratio = np.exp2(random.uniform(-17, 16, scale.size)) * random.choice([-1, 1], scale.size)
    middles = (_GRID[1:] + _GRID[:-1]) / 2
    ratio[::2] = random.choice(middles, ratio[::2].size)
    x = (ratio * scale.astype(np.float64)).astype(np.float32)
    x[1::4] = (words(x[1::4]) & np.uint32(0xFFFF0000)).view(np.float32)  # as of bfloat16
    assert np.array_equal(quotients(x, scale, off), x / scale)


@pytest.mark.parametrize("quant_max", [448.0, 57344.0])
def test_scales_are_those_of_division(quant_max):
    magnitude = np.exp2(np.random.default_rng(0).uniform(-110, 128, 200_000)).astype(np.float32)
    constants = (
        words(np.full_like(magnitude, quant_max)),
        words(np.full_like(magnitude, 1 / quant_max)),
    )
    (found,) = run(divide(), words(magnitude), *constants)
    assert np.array_equal(found.view(np.float32), magnitude / np.float32(quant_max))


@pytest.mark.parametrize("sm80", [False, True])
def test_quotients_that_are_no_numbers_or_have_a_sign(sm80):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e-45], np.float32)
    found = quotients(x, np.full_like(x, 2.0**-20), sm80=sm80)
    assert np.array_equal(np.signbit(found[[0, 1, 6]]), [False, True, True])
    assert np.array_equal(found[:4], [0, 0, np.inf, -np.inf])
    assert np.isnan(found[4])
    assert found[5] >= 2.0**20
    assert np.isnan(quotients(x, np.full_like(x, np.nan), sm80=sm80)).all()
    huge = quotients(x[2:4], np.full(2, torch.finfo(torch.float32).max, np.float32), sm80=sm80)
    assert np.array_equal(huge, [np.inf, -np.inf])


@pytest.mark.parametrize(
    ("numbers", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_codes(numbers, dtype):
    """Every number of bfloat16, and what is beside the middles of two codes."""
    every = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    x = np.concatenate([every, every + np.uint32(1), every - np.uint32(1)]).view(np.float32)
    most = torch.finfo(dtype).max
    expected = torch.from_numpy(x).clamp(-most, most).to(dtype).view(torch.uint8).numpy()
    zero_point = np.zeros_like(x)
    for place in range(4):
        inputs = [words(x if i == place else zero_point) for i in range(4)]
        (found,) = run(pack_float8(numbers), *inputs)
        code = found >> np.uint32(8 * place)
        assert np.array_equal(np.where(np.isnan(x), 127, expected), code)


@pytest.mark.parametrize(("element", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounding_to_16_bits(element, dtype):
    """Beside every number that has half as many bits, and in either half."""
    every = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    x = np.concatenate([every + np.uint32(low) for low in (0, 0x7FFF, 0x8000, 0x8001)])
    x = x[np.isfinite(x.view(np.float32))]
    expected = torch.from_numpy(x.view(np.float32)).to(dtype).view(torch.int16).numpy()
    zero_point = np.zeros_like(x)
    for inputs, shift in (((x, zero_point), 0), ((zero_point, x), 16)):
        (found,) = run(round_pair(element), *inputs)
        assert np.array_equal(
            (found >> np.uint32(shift)).astype(np.uint16), expected.view(np.uint16)
        )


def call(spec=None, shape=(40, 300), dtype=torch.bfloat16):
    return Call("quantize", spec or Spec("f8e4m3", (1, 128)), shape, shape, dtype, "cuda")


def test_calls():
    blocks, formats = ((1, 128), (1, WHOLE), (WHOLE, WHOLE)), ("f8e4m3", "f8e5m2")
    for numbers, block in product(formats, blocks):
        assert KERNEL.refuses(call(Spec(numbers, block))) is None
    assert "found int8" in KERNEL.refuses(call(Spec("int8", (1, 128))))
    assert "found f8e4m3" in KERNEL.refuses(call(Spec("f8e4m3", (1, 128), "e8m0")))
    assert "128 numbers" in KERNEL.refuses(call(Spec("f8e4m3", (128, 128))))
    mean = Spec("f8e4m3", (1, WHOLE), options=(("scale_rule", "absmean"),))
    assert "absmean" in KERNEL.refuses(call(mean))
    assert "float64" in KERNEL.refuses(call(dtype=torch.float64))
    assert "(2, 3, 4)" in KERNEL.refuses(call(shape=(2, 3, 4)))
    assert "(0, 4)" in KERNEL.refuses(call(shape=(0, 4)))


def test_bad_input():
    x, scale = torch.ones(3, 5), torch.ones(1)
    with pytest.raises(ConfigError, match="numbers='int8'"):
        cast_dual(x, "int8", "row")
    with pytest.raises(ConfigError, match="scales='column'"):
        cast_dual(x, "f8e4m3", "column")
    for scales, given in (("given", None), ("row", scale)):
        with pytest.raises(ConfigError, match="belongs to 'given'"):
            cast_dual(x, "f8e4m3", scales, given)
    with pytest.raises(ConfigError, match="one number in float32"):
        cast_dual(x, "f8e4m3", "given", torch.ones(2))
    with pytest.raises(UnsupportedOp, match="float64"):
        cast_dual(x.double(), "f8e4m3", "row")

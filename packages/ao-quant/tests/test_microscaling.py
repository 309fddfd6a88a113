"""MX and NVFP4 against other implementations: NumPy in float64 with ml_dtypes, and gfloat."""

from __future__ import annotations

import math

import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.block import compute_scale_amax, quantize_block
from torch import nn

from ao_core import quantize_, quantize_tensor
from ao_quant import (
    MXDynamicActivationMXWeightConfig,
    MXWeightOnlyConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)

#: element -> (type of ml_dtypes, greatest value, bits of mantissa)
ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 3),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 2),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 2),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 3),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 1),
}
MODES = ("floor", "ceil", "even", "rceil")


def weights(rows: int = 23, columns: int = 77) -> torch.Tensor:
    """Gaussian rows of very different sizes, one of zeros; blocks of 32 and 16 end raggedly."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator))
    x[3] = 0
    return x


def encode(x: np.ndarray, element: str) -> np.ndarray:
    """The nearest value of an element format, saturating, in float64."""
    if element == "int8":  # MX calls its values n / 64; the factor is in the scale here
        return np.clip(np.rint(x * 64), -128, 127) / 64
    kind, greatest, _ = ELEMENTS[element]
    return np.clip(x, -greatest, greatest).astype(kind).astype(np.float64)


def exponent(absmax: float, element: str, mode: str) -> int:
    """The shared exponent by the definition of each mode."""
    greatest, mbits = (127 / 64, 6) if element == "int8" else ELEMENTS[element][1:]
    if absmax == 0:
        return 0
    below = math.floor(math.log2(absmax))
    emax = math.floor(math.log2(greatest))
    if mode == "ceil":
        return math.ceil(math.log2(absmax)) - emax
    if mode == "rceil":
        return math.ceil(math.log2(absmax / greatest))
    if mode == "even":
        rounded = math.floor(absmax / 2.0 ** (below - mbits) + 0.5) * 2.0 ** (below - mbits)
        return math.floor(math.log2(rounded)) - emax
    return below - emax


def mx(x: torch.Tensor, element: str, mode: str = "floor") -> tuple[np.ndarray, np.ndarray]:
    """(values, exponents) of a matrix in blocks of 32 along its rows."""
    exact = x.double().numpy()
    values, exponents = np.empty_like(exact), []
    for row, out in zip(exact, values, strict=True):
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            shared = exponent(float(np.abs(block).max()), element, mode)
            out[start : start + 32] = encode(block / 2.0**shared, element) * 2.0**shared
            exponents.append(shared)
    return values, np.array(exponents).reshape(len(exact), -1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", [*ELEMENTS, "int8"])
def test_mx_bit_for_bit(element, mode):
    x = weights()
    spec = MXWeightOnlyConfig(element, mode).spec(x.shape, x.dtype)
    q = quantize_tensor(x, spec)
    values, exponents = mx(x, element, mode)
    np.testing.assert_array_equal(q.dequantize().double().numpy(), values)
    assert q.scale.dtype == torch.float8_e8m0fnu
    stored = q.scale.view(torch.uint8).int().numpy() - 127
    zeros = np.abs(x.numpy()).max(1) == 0
    implied = 6 if element == "int8" else 0  # MXINT8 calls its codes n / 64
    np.testing.assert_array_equal(stored[~zeros] + implied, exponents[~zeros])


@pytest.mark.parametrize(
    "name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"]
)
def test_mx_as_in_gfloat(name):
    x = weights(20, 64)
    info = getattr(gfloat.formats, f"format_info_{name}")
    expected = [
        quantize_block(info, block, compute_scale_amax)
        for block in x.double().numpy().reshape(-1, 32)
    ]
    element = name.rpartition("_")[2] if "_" in name else "int8"
    q = quantize_tensor(x, MXWeightOnlyConfig(element).spec(x.shape, x.dtype))
    np.testing.assert_array_equal(q.dequantize().double().numpy(), np.reshape(expected, (20, 64)))


def nvfp4(x: np.ndarray, two_levels: bool = True) -> np.ndarray:
    """NVFP4 of a matrix: e4m3 scales of blocks of 16 under one for all, then the nearest element."""
    outer = float(np.abs(x).max()) / (448 * 6) if two_levels else 1.0
    values = np.empty_like(x)
    for row, out in zip(x, values, strict=True):
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            ratio = np.clip(np.abs(block).max() / 6 / outer, 2.0**-9, 448)
            scale = float(np.float64(ratio).astype(ml_dtypes.float8_e4m3fn)) * outer
            out[start : start + 16] = encode(block / scale, "e2m1") * scale
    return values


@pytest.mark.parametrize("two_levels", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-4, 3e3])
def test_nvfp4_is_as_good_as_another_implementation(two_levels, size, sqnr_db):
    x = torch.randn(96, 200, generator=torch.Generator().manual_seed(1)) * size
    spec = NVFP4WeightOnlyConfig(two_levels).spec(x.shape, x.dtype)
    got, other = (
        quantize_tensor(x, spec).dequantize(),
        torch.from_numpy(nvfp4(x.double().numpy(), two_levels)),
    )
    assert sqnr_db(x, got) == pytest.approx(sqnr_db(x, other), abs=0.05)
    # roundings of the scale's own division apart, the same values
    assert float(((got - other).abs() > 1e-5 * size).double().mean()) < 0.002
    if two_levels:  # whatever the size
        assert 20.3 < sqnr_db(x, got) < 21.3
    else:  # e4m3 alone is too coarse for small scales
        assert (sqnr_db(x, got) > 20) == (size == 1.0)


def test_mxfp4_is_as_good_as_another_implementation(sqnr_db):
    x = torch.randn(96, 200, generator=torch.Generator().manual_seed(1))
    got = quantize_tensor(x, MXWeightOnlyConfig().spec(x.shape, x.dtype)).dequantize()
    assert sqnr_db(x, got) == pytest.approx(
        sqnr_db(x, torch.from_numpy(mx(x, "e2m1")[0])), abs=1e-6
    )
    assert 18 < sqnr_db(x, got) < 19.5


def matmul(layer, config, x, sqnr_db, fake):
    """SQNR between a quantized layer's output and the matmul of independently quantized operands."""
    w = layer.weight.detach().clone()
    bias = layer.bias.detach().double()
    (record, *_) = quantize_(layer, config)
    assert record.status == "changed"
    expected = torch.from_numpy(fake(x) @ fake(w).T) + bias
    with torch.no_grad():
        return sqnr_db(expected.reshape(-1), layer(x).reshape(-1))


@pytest.mark.parametrize("element", ["e4m3", "e2m3", "e2m1", "int8"])
def test_matmuls_of_mx_with_mx(element, sqnr_db):
    layer, x = nn.Linear(77, 33), torch.randn(9, 77)
    config = MXDynamicActivationMXWeightConfig(element, element, "rceil")
    # float32 sums of the same numbers
    assert matmul(layer, config, x, sqnr_db, lambda t: mx(t, element, "rceil")[0]) > 110


def test_matmuls_of_two_elements(sqnr_db):
    layer, x = nn.Linear(77, 33), torch.randn(9, 77)
    w = layer.weight.detach().clone()
    quantize_(layer, MXDynamicActivationMXWeightConfig("e2m1", "e4m3", "floor"))
    expected = torch.from_numpy(mx(x, "e4m3")[0] @ mx(w, "e2m1")[0].T) + layer.bias.double()
    with torch.no_grad():
        assert sqnr_db(expected, layer(x)) > 110


@pytest.mark.parametrize("two_levels", [True, False])
def test_matmuls_of_nvfp4_with_nvfp4(two_levels, sqnr_db):
    layer, x = nn.Linear(77, 33), torch.randn(9, 77)
    config = NVFP4DynamicActivationNVFP4WeightConfig(two_levels)

    def fake(t):
        return nvfp4(t.double().numpy(), two_levels)

    assert matmul(layer, config, x, sqnr_db, fake) > 35


def test_two_levels_of_scales_take_4_bytes_a_matrix():
    x = weights(64, 96)
    one, two = (
        quantize_tensor(x, NVFP4WeightOnlyConfig(t).spec(x.shape, x.dtype)).stored_bytes
        for t in (False, True)
    )
    assert (one, two) == (64 * 96 // 2 + 64 * 6, 64 * 96 // 2 + 64 * 6 + 4)

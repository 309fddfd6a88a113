"""Values of the LUTs for the state of optimizers: fine near zero, over many orders of magnitude."""

from __future__ import annotations

from ctypes import c_float
from itertools import pairwise

__all__ = ["companded_values", "dynamic_values", "linear_values", "unsigned_float_values"]


def dynamic_values(bits: int, signed: bool) -> tuple[float, ...]:
    """The 2**bits values of dynamic tree quantization, increasing.

    Each decade below 1 has twice as many values as the next lower one, at the centres of equal
    intervals between 0.1 and 1 of it; 0 and 1 are added. In float32 throughout, as bitsandbytes
    computes the map of its 8-bit optimizers: to the same bits.
    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), section 1.3.
    """
    decades = bits - 1
    values = [0.0, 1.0]
    for decade in range(decades):
        count = (1 if signed else 2) << decade
        bounds = _linspace(0.1, 1.0, count + 1)
        power = _float32(10.0 ** (decade + 1 - decades))
        for low, high in pairwise(bounds):
            centre = _float32(power * _float32(_float32(low + high) / 2))
            values += [centre, -centre] if signed else [centre]
    return tuple(sorted(values))


def _float32(value: float) -> float:
    """The nearest float32. Sums and products of two of them are exact, or rounded once, in float64."""
    return c_float(value).value


def _linspace(start: float, end: float, count: int) -> list[float]:
    """`torch.linspace` in float32, of two values and more, to the same bits; from both ends."""
    start, end = _float32(start), _float32(end)
    step = _float32(_float32(end - start) / (count - 1))
    half = count // 2
    return [
        _float32(start + step * i) if i < half else _float32(end - step * (count - 1 - i))
        for i in range(count)
    ]


def companded_values(signed: bool) -> tuple[float, ...]:
    """8 bits: ±(i/127)² for a first moment, (i/255)⁴ for a second one, increasing."""
    if signed:
        return tuple(i * abs(i) / 127**2 for i in range(-127, 128))
    return tuple((i / 255) ** 4 for i in range(256))


def linear_values(bits: int) -> tuple[float, ...]:
    """(i + 1) / 2**bits: for second moments, of which none may become 0.

    Source: Li et al., "Memory Efficient Optimizers with 4-bit States" (2023), §4.1.
    """
    return tuple((i + 1) / 2**bits for i in range(2**bits))


def unsigned_float_values() -> tuple[float, ...]:
    """8 bits: 5 of exponent, 3 of mantissa, for averages of squares; from 2**-31 to 1.875, increasing.

    No sign, no subnormals, no 0: a code is 8 bits of a float32, and no moment becomes a 0 that a step
    divides by. 32 octaves of squares are 16 of gradients; e4m3 has 18, for squares as for gradients.
    """
    return tuple((8 + i % 8) / 8 * 2.0 ** (i // 8 - 31) for i in range(256))

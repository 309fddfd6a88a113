"""Blocks rounded to MX and NVFP4 in Triton's interpreter, bit for bit as the reference does."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Spec
from ao_core.ext import registry
from ao_core.ext.kernels import fake_quantize_reference
from ao_core.ext.numerics import MX_MODES
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_codecs import contents, same_values
from ao_kernels.triton.fake_quantize.records import fake_quantize

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

NESTED = Spec("f8e4m3", (WHOLE, WHOLE))
ELEMENTS = ("f8e4m3", "f4e2m1", "f8e5m2", "f6e3m2", "f6e2m3", "int8")
#: one wide and one narrow; the others with `--all`
SOME = [*ELEMENTS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in ELEMENTS[2:])]


def mx(element, mode="floor", block=32):
    return Spec(element, (1, block), "e8m0", options=(("mx_mode", mode),))


@pytest.mark.parametrize("spec", [mx(element) for element in ELEMENTS], ids=str)
@pytest.mark.parametrize("kind", ["range", "not finite", "ties"])
def test_mx(spec, kind):
    x = contents(kind, spec, (7, 100), torch.float32, seed=3)
    assert same_values(fake_quantize(x, spec), fake_quantize_reference(x, spec))


@pytest.mark.parametrize("mode", MX_MODES)
@pytest.mark.parametrize("element", SOME)
def test_powers_of_two(element, mode):
    """Largest magnitudes around every place where the rule changes, and around those of float32."""
    dtype = registry.dtypes.get(element)
    factors = torch.tensor([0.5, 1.0, 4 / 3, 1.5, 1.75, 15 / 8, 31 / 16, dtype.max])
    factors = torch.cat([torch.nextafter(factors, factors * by) for by in (0.5, 1.0, 2.0)])
    sizes = torch.exp2(torch.tensor([-149.0, -127, -126, -122, -9, 0, 1, 100, 118]))
    greatest = (factors[:, None] * sizes).reshape(-1, 1)
    x = gaussian((len(greatest), 32)).clamp(-1, 1) * greatest
    x[:, 3:4] = -greatest
    spec = mx(element, mode)
    assert same_values(fake_quantize(x, spec), fake_quantize_reference(x, spec))


@pytest.mark.parametrize(
    ("scale", "shape"), [("e4m3", (3, 2, 64)), (NESTED, (9, 50)), (NESTED, (150, 140))], ids=str
)
@pytest.mark.parametrize("kind", ["range", "not finite"])
def test_nvfp4(scale, shape, kind):
    spec = Spec("f4e2m1", (1, 16), scale)
    x = contents(kind, spec, shape, torch.float16, seed=5)
    assert same_values(fake_quantize(x, spec), fake_quantize_reference(x, spec))


def test_zeros_and_strides():
    spec = Spec("f4e2m1", (1, 16), NESTED)
    zeros = torch.zeros(4, 33)
    zeros[1::2] = -0.0
    assert same_values(fake_quantize(zeros, spec), zeros)
    turned = gaussian((40, 30)).t()
    assert same_values(
        fake_quantize(turned, mx("f8e4m3")), fake_quantize_reference(turned, mx("f8e4m3"))
    )


def test_error_of_four_bits():
    """Neither a copy nor noise: 17 to 20 dB for Gaussian numbers."""
    x = gaussian((64, 128))
    for spec in (mx("f4e2m1"), Spec("f4e2m1", (1, 16), NESTED)):
        error = fake_quantize(x, spec) - x
        sqnr = 20 * torch.log10(x.norm() / error.norm())
        assert 17 < sqnr < 22

"""The Hadamard transform in Triton's interpreter: the reference's bits where sums are butterflies."""

from __future__ import annotations

import pytest
import torch

from ao_core.ext import registry
from ao_core.ext.numerics import hadamard_transform, inverse_hadamard_transform
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_rotation import transformed
from ao_kernels.triton.hadamard.op import transform
from ao_kernels.triton.hadamard.records import hadamard

# Triton 3.6 with NumPy 2.2
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

POWERS = (1, 2, 8, 16, 64, 512, 4096)
#: a matrix of Paley's, with rows of zeros up to a power of two or without
MULTIPLIED = (12 * 16, 28 * 32, 52 * 16, 44 * 16, 20 * 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("block", POWERS)
def test_powers_of_two_have_the_bits_of_the_reference(block, dtype):
    x = gaussian((3, 2 * block)).to(dtype)
    assert torch.equal(hadamard(x, block, False), hadamard_transform(x, block))
    assert torch.equal(hadamard(x, block, True), inverse_hadamard_transform(x, block))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("block", MULTIPLIED)
def test_other_orders_are_the_product_with_the_matrix(block, inverse):
    x = gaussian((2, 2 * block))
    found, expected = hadamard(x, block, inverse).double(), transformed(x, block, inverse)
    assert (found - expected).norm() <= 2e-7 * expected.norm()


def test_bfloat16():
    """The interpreter cuts off where a device rounds to bfloat16."""
    x = gaussian((3, 128)).bfloat16()
    found, expected = hadamard(x, 128, False), transformed(x, 128, False)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("shape", [(0, 16), (16,), (2, 0, 16), (2, 3, 48), (200, 16)])
def test_any_shape(shape):
    x = gaussian(shape)
    assert torch.equal(hadamard(x, 16, False), hadamard_transform(x, 16))


def test_inputs_of_any_stride():
    x = gaussian((32, 5)).T
    assert torch.equal(hadamard(x, 32, False), hadamard_transform(x, 32))
    wide = gaussian((3, 64))[:, ::2]
    assert torch.equal(hadamard(wide, 32, False), hadamard_transform(wide, 32))


def test_what_is_not_finite_stays_in_its_block():
    x = gaussian((2, 64))
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    y = hadamard(x, 32, False)
    bad = y.isfinite().logical_not().reshape(4, 32)
    assert bad.all(1).tolist() == [True, False, False, True]
    assert bad.any(1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("block", [64, 192])
def test_custom_op(block):
    """Schema, fake implementation and registration, for `torch.compile`."""
    results = torch.library.opcheck(transform, (gaussian((3, 192)), block, True))
    assert set(results.values()) == {"SUCCESS"}, results


def test_the_kernel_of_the_table_is_this():
    assert registry.kernels.get("triton_hadamard").fn is hadamard

"""The kernel of `hadamard` on the CPU, against the reference and the matmul with the matrix in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ao_core import Call
from ao_core.ext import hadamard, registry
from ao_core.ext.kernels import hadamard_spec, select
from ao_core.ext.numerics import hadamard_factors, hadamard_matrix, hadamard_transform, has_hadamard
from ao_core.testing import KernelSuite
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_rotation import transformed
from ao_kernels.cpu.hadamard import hadamard as kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: a size of vectors, what fills none, and what is larger than the nearest cache
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 32768)
#: other orders of each construction, alone and with powers of two to both sides of a vector's width
OTHERS = (12, 20, 24, 28, 36, 40, 44, 52, 60, 96, 100, 144, 192, 244, 320, 344, 688, 3072, 11008)


class TestHadamard(KernelSuite):
    kernel = "cpu_hadamard"


def call(block: int, dtype: torch.dtype) -> Call:
    shape = (3, block)
    return Call("hadamard", hadamard_spec(block), shape, shape, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", POWERS)
def test_powers_of_two_have_the_bits_of_the_reference(block: int, dtype: torch.dtype) -> None:
    assert select(call(block, dtype)).name == "cpu_hadamard"
    x = gaussian((3, 2 * block)).to(dtype)
    assert torch.equal(kernel(x, block, False), hadamard_transform(x, block))
    assert torch.equal(kernel(x, block, True), hadamard_transform(x, block))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("block", OTHERS)
def test_other_orders_are_the_product_with_the_matrix(block: int, inverse: bool) -> None:
    for blocks in (1, 3) if block > 1000 else (1, 16, 21):
        x = gaussian((blocks, block))
        if block > 4000:  # the matrix would take a gigabyte
            expected = (registry.kernels.get("reference_hadamard").fn(x, block, inverse)).double()
        else:
            expected = transformed(x, block, inverse)
        found = kernel(x, block, inverse).double()
        assert (found - expected).norm() <= 4e-7 * expected.norm()


def test_every_order_of_both_constructions_has_the_matrix_of_the_reference() -> None:
    """The C++ code makes Paley's matrices by itself; of units every element is exact but for 1/√n."""
    orders = [n for n in range(12, 701, 4) if has_hadamard(n) and hadamard_factors(n) == (n, 1)]
    assert {28, 52, 100, 244, 344} <= set(orders)
    assert len(orders) == 67
    for order in orders:
        found = kernel(torch.eye(order), order, False).T
        assert torch.equal(found.sign().to(torch.int8), hadamard_matrix(order)), order
        assert torch.allclose(found.abs(), torch.tensor(order**-0.5), rtol=1e-6, atol=0)


def test_subnormal_and_huge_numbers() -> None:
    for value in (1e-42, 3e-39, torch.finfo(torch.float32).max / 64):
        x = torch.full((1, 4096), value)
        assert torch.equal(kernel(x, 4096, False), hadamard_transform(x, 4096))


def test_what_is_not_finite_stays_in_its_block() -> None:
    for block in (4, 12, 32, 192):
        x = gaussian((2, 2 * block))
        x[0, 1], x[1, block + 1] = torch.nan, torch.inf
        bad = kernel(x, block, False).isfinite().logical_not().reshape(4, block)
        assert bad.all(1).tolist() == bad.any(1).tolist() == [True, False, False, True]


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever a test sets, the number of threads is afterwards as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("block", [8, 12, 28 * 512, 4096, 344 * 2])
def test_same_bits_for_any_number_of_threads(block: int) -> None:
    x, found = gaussian((200_000 // block, block)), []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        found.append(kernel(x, block, True))
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_any_stride() -> None:
    x = gaussian((5, 96))
    for each in (
        x.T.contiguous().T,
        gaussian((5, 192))[:, ::2],
        gaussian((2, 5, 96)).transpose(0, 1),
    ):
        assert torch.equal(kernel(each, 48, False), kernel(each.contiguous(), 48, False))


def test_what_is_refused() -> None:
    record = registry.kernels.get("cpu_hadamard")
    assert "not torch.float64" in str(record.refuses(call(64, torch.float64)))
    # 2 (769 + 1), whose parts have no matrices
    assert hadamard_factors(1540) == (1540, 1)
    assert "order 1024 at most, found 1540" in str(record.refuses(call(1540, torch.float32)))
    x = gaussian((2, 1540))
    assert torch.equal(hadamard(x, 1540), hadamard_transform(x, 1540))
    assert record.describe(call(8960, torch.float32)).endswith("orders 28 × 20 × 16")


class Rotated(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return hadamard(hadamard(x, 48).relu(), 12, inverse=True)


@pytest.mark.slow
def test_compiled_code_calls_it() -> None:
    torch._dynamo.reset()
    x = gaussian((5, 48)).requires_grad_()
    compiled = torch.compile(Rotated(), fullgraph=True)
    assert torch.equal(compiled(x), Rotated()(x))
    grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (compiled, Rotated())]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    program = torch.export.export(Rotated(), (x.detach(),))
    assert "ao_kernels.hadamard" in str(program.graph)

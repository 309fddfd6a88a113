"""Hadamard matrices and the transform, against their definition in integers and in float64."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ao_core.errors import ConfigError
from ao_core.numerics import (
    hadamard,  # the module
    hadamard_factors,
    hadamard_matrix,
    hadamard_transform,
    has_hadamard,
    inverse_hadamard_transform,
    largest_block,
)
from ao_core.numerics.characters import prime_power, quadratic_character

LIMIT = 512
SIZES = (1, 2, 12, 20, 28, 36, 40, 44, 52, 60, 96, 128, 144, 172 * 2, 3072)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )


def dense(x: Tensor, block: int) -> Tensor:
    """The definition: every block is multiplied by the matrix, in float64."""
    matrix = hadamard_matrix(block).double() / math.sqrt(block)
    return (x.double().unflatten(-1, (-1, block)) @ matrix.T).flatten(-2)


def orders_in_theory() -> set[int]:
    """Products of 2 and Paley's orders up to LIMIT, from a sieve, by closure."""
    composite = {m for d in range(2, LIMIT) for m in range(2 * d, LIMIT + 1, d)}
    primes = [p for p in range(2, LIMIT + 1) if p not in composite]
    powers = {p**m for p in primes for m in range(1, 10) if p**m <= LIMIT}
    orders = {1, 2}
    orders |= {q + 1 for q in powers if q % 4 == 3} | {2 * (q + 1) for q in powers if q % 4 == 1}
    while (more := {a * b for a in orders for b in orders if a * b <= LIMIT}) - orders:
        orders |= more
    return {n for n in orders if n <= LIMIT}


def test_orders_are_those_of_the_theory():
    assert {n for n in range(-4, LIMIT + 1) if has_hadamard(n)} == orders_in_theory()


def test_every_matrix_is_orthogonal_in_integers():
    for n in sorted(orders_in_theory()):
        matrix = hadamard_matrix(n)
        assert matrix.dtype == torch.int8
        assert bool((matrix.abs() == 1).all())
        product = matrix.int() @ matrix.int().T
        assert torch.equal(product, n * torch.eye(n, dtype=torch.int32)), n


def test_matrices_never_change():
    """Transformed weights are stored: another matrix of the same order would make them wrong."""
    digest = hashlib.sha256()
    for n in sorted(orders_in_theory()):
        digest.update(hadamard_matrix(n).numpy().tobytes())
    assert digest.hexdigest() == "72399b13d692e7ce24f1d318a7ec72735db96cd8fe7d8e8479adc4a374532259"


def test_known_matrices():
    assert hadamard_matrix(2).tolist() == [[1, 1], [1, -1]]
    signs = ["".join("+-"[v < 0] for v in row) for row in hadamard_matrix(12).tolist()]
    # Paley I of the field with 11 elements, whose squares are 1, 3, 4, 5, 9
    assert signs[:3] == ["++++++++++++", "-+-+---+++-+", "-++-+---+++-"]
    assert hadamard_factors(24) == (12, 2)
    assert hadamard_factors(144) == (12, 12, 1)
    assert hadamard_factors(3072) == (12, 256)
    assert hadamard_factors(8960) == (28, 20, 16)
    assert hadamard_factors(11008) == (344, 32)
    assert hadamard_factors(14336) == (28, 512)
    assert hadamard_factors(13824) == (12, 12, 12, 8)
    assert hadamard_factors(18944) == (148, 128)


@pytest.mark.parametrize(("p", "m"), [(11, 1), (3, 2), (5, 2), (3, 5), (7, 3)])
def test_characters_of_fields(p: int, m: int):
    """Half of the elements are squares, and autocorrelations are -1: what Paley's constructions need."""
    q = p**m
    signs = quadratic_character(p, m)
    assert signs[0] == 0
    assert sum(signs) == 0
    digits = [[number // p**place % p for place in range(m)] for number in range(q)]
    for shift in (1, q - 1):
        moved = [
            sum(
                (a + b) % p * p**place
                for place, (a, b) in enumerate(zip(d, digits[shift], strict=True))
            )
            for d in digits
        ]
        assert sum(signs[a] * signs[b] for a, b in enumerate(moved)) == -1


def test_prime_powers():
    assert [q for q in range(-1, 30) if prime_power(q)] == [
        *(2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29),
    ]
    assert prime_power(343) == (7, 3)


@pytest.mark.parametrize(
    ("n", "block"),
    [(1, 1), (7, 1), (92, 4), (172, 4), (184, 8), (344, 344), (11008, 11008), (18944, 18944)],
)
def test_largest_block(n: int, block: int):
    assert largest_block(n) == block
    assert all(not has_hadamard(d) for d in range(block + 1, n + 1) if n % d == 0)


@pytest.mark.parametrize("block", SIZES)
def test_transform_is_the_product_with_the_matrix(block: int):
    x = random(2, 3, 2 * block)
    got = hadamard_transform(x, block)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, dense(x, block), rtol=0, atol=1e-13)
    torch.testing.assert_close(inverse_hadamard_transform(got, block), x, rtol=0, atol=1e-13)
    inverse = inverse_hadamard_transform(x, block)
    torch.testing.assert_close(dense(inverse, block), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("block", [12, 64, 144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computed_in_float32_and_rounded_once(block: int, dtype: torch.dtype):
    x = random(5, 2 * block, dtype=dtype)
    got, exact = hadamard_transform(x, block), dense(x, block)
    assert got.dtype == dtype
    # half a step of the dtype, and float32's error of one addition for each factor of 2
    size = dense(x, block).abs()
    rounding = torch.finfo(dtype).eps / 2 * size
    sums = 2**-24 * (block.bit_length() + 2) * x.double().abs().unflatten(-1, (-1, block)).sum(-1)
    allowed = rounding + (sums / math.sqrt(block)).repeat_interleave(block, -1)
    assert bool(((got.double() - exact).abs() <= allowed).all())
    if (
        dtype != torch.float32
    ):  # more than half of the values are the nearest ones: no second rounding
        assert (got == exact.to(dtype)).double().mean() > 0.99


def test_sums_of_integers_are_exact():
    x = torch.randint(-1000, 1000, (4, 4096), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(hadamard_transform(x, 4096).double(), dense(x, 4096))


def test_matrices_are_made_once_and_fit_everywhere(monkeypatch: pytest.MonkeyPatch):
    """What a first call below a mode leaves behind serves later calls; tracing makes its own."""
    hadamard._kept.cache_clear()
    x = random(2, 28)
    with torch.inference_mode():
        expected = hadamard_transform(x, 28)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert hadamard_transform(mode.from_tensor(x), 28).shape == x.shape
    monkeypatch.setattr(hadamard, "_paley", None)
    assert torch.equal(hadamard_transform(x, 28), expected)
    grown = x.clone().requires_grad_()
    hadamard_transform(grown, 28).sum().backward()
    assert grown.grad is not None
    hadamard_matrix(28).zero_()  # the caller's own
    assert torch.equal(hadamard_transform(x, 28), expected)


@pytest.mark.parametrize("block", [11008, 14336])
def test_sizes_of_models(block: int):
    x = random(2, block, dtype=torch.float32)
    y = hadamard_transform(x, block)
    torch.testing.assert_close(y.double().norm(dim=-1), x.double().norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(inverse_hadamard_transform(y, block), x, rtol=0, atol=1e-5)
    one = torch.zeros(1, block)
    one[0, 5] = 1.0
    spread = hadamard_transform(one, block).abs()
    torch.testing.assert_close(spread, torch.full_like(one, block**-0.5), rtol=1e-6, atol=0)


def test_blocks_where_the_size_has_no_matrix():
    x = random(3, 172)
    block = largest_block(172)
    torch.testing.assert_close(hadamard_transform(x, block), dense(x, block), rtol=0, atol=1e-14)


@pytest.mark.parametrize("transform", [hadamard_transform, inverse_hadamard_transform])
@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24), (2, 0), (24,), (2, 2, 2, 24)])
def test_any_shape(transform, shape: tuple[int, ...]):
    x = random(*shape, dtype=torch.bfloat16)
    before = x.clone()
    y = transform(x, 12)
    assert y.shape == x.shape
    assert y.is_contiguous()
    assert torch.equal(x, before)
    for index in range(x.shape[:-1].numel()):
        row, expected = (t.flatten(0, -2)[index] if t.ndim > 1 else t for t in (x, y))
        assert torch.equal(transform(row, 12), expected)


def test_not_contiguous():
    x = random(24, 7).T
    assert torch.equal(hadamard_transform(x, 24), hadamard_transform(x.contiguous(), 24))
    x = random(3, 48)[:, ::2]
    assert torch.equal(hadamard_transform(x, 24), hadamard_transform(x.contiguous(), 24))


def test_the_ends_of_float32():
    greatest = torch.finfo(torch.float32).max
    x = torch.full((1, 4096), greatest / 64)
    assert hadamard_transform(x, 4096)[0, 0] == greatest
    x = torch.full((1, 64), torch.finfo(torch.float32).tiny)
    assert hadamard_transform(x, 64)[0, 0] == 8 * torch.finfo(torch.float32).tiny
    x[0, 3] = torch.inf
    assert not bool(hadamard_transform(x, 64).isfinite().any())


@pytest.mark.parametrize("block", [8, 12, 144])
def test_gradients(block: int):
    x = random(2, block).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: hadamard_transform(v, block), (x,))
    upward = random(2, block)
    (grad,) = torch.autograd.grad(hadamard_transform(x, block), x, upward)
    torch.testing.assert_close(grad, inverse_hadamard_transform(upward, block), rtol=0, atol=1e-14)


class Rotated(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return inverse_hadamard_transform(hadamard_transform(x, 52).relu(), 104)


def test_export():
    x = random(3, 104, dtype=torch.float32)
    rows = torch.export.Dim("rows")
    for strict in (False, True):
        program = torch.export.export(Rotated(), (x,), dynamic_shapes=({0: rows},), strict=strict)
        for count in (3, 5):
            x = random(count, 104, dtype=torch.float32)
            assert torch.equal(program.module()(x), Rotated()(x))


@pytest.mark.slow
def test_one_graph_for_any_number_of_rows():
    torch._dynamo.reset()
    compiled = torch.compile(Rotated(), fullgraph=True, dynamic=True)
    for count in (3, 5):
        x = random(count, 104, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), Rotated()(x), rtol=0, atol=1e-6)


def test_shapes_without_data():
    with FakeTensorMode():
        assert hadamard_transform(torch.empty(2, 24, dtype=torch.float16), 12).shape == (2, 24)
    assert hadamard_transform(torch.empty(2, 24, device="meta"), 12).device.type == "meta"


@pytest.mark.parametrize(
    ("x", "block", "message"),
    [
        (torch.ones(2, 8, dtype=torch.int32), 8, "torch.int32"),
        (torch.tensor(1.0), 1, "0-dimensional"),
        (torch.ones(2, 172), 172, "order n=172; use a block of 4"),
        (torch.ones(2, 24), 16, "block=16 does not divide the last dimension, 24; use 24"),
        (torch.ones(2, 24), 0, "n=0; use 1 or more"),
    ],
)
def test_errors_say_what_would_work(x: Tensor, block: int, message: str):
    for transform in (hadamard_transform, inverse_hadamard_transform):
        with pytest.raises(ConfigError, match=message):
            transform(x, block)


def test_errors_of_sizes():
    with pytest.raises(ConfigError, match="n=92; use a block of 4"):
        hadamard_matrix(92)
    with pytest.raises(ConfigError, match="n=0 has no divisors"):
        largest_block(0)

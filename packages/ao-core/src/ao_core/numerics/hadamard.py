"""Hadamard matrices of any order that has one by construction, and the transform with them.

A Hadamard matrix H of order n has elements ±1 and H Hᵀ = n I. H/√n is orthonormal, so a linear layer is
unchanged when both its input and the rows of its weight are transformed: (Hx)ᵀ(Hw) / n = xᵀw.

Sources: Sylvester (1867) for powers of two; Paley, "On orthogonal matrices" (1933), for q + 1 where
q ≡ 3 mod 4 is a power of a prime (construction I), and 2 (q + 1) where q ≡ 1 mod 4 is (construction II).
A Kronecker product of Hadamard matrices is one.

Transformed weights are stored, so which matrix an order has is part of ao's formats: it never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ao_core.errors import ConfigError
from ao_core.neutral import neutral
from ao_core.numerics.characters import prime_power, quadratic_character
from ao_core.numerics.compiling import may_be_compiled

__all__ = [
    "hadamard_factors",
    "hadamard_matrix",
    "hadamard_scales",
    "hadamard_transform",
    "has_hadamard",
    "inverse_hadamard_transform",
    "largest_block",
]

#: order of the largest of Paley's matrices that are kept, a megabyte each
_GREATEST_KEPT = 1024

P = ParamSpec("P")
R = TypeVar("R")


def _constant(function: Callable[P, R]) -> Callable[P, R]:
    """What `torch.compiler.assume_constant_result` does, which imports the compiler with all it needs."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def has_hadamard(n: int) -> bool:
    """Whether `hadamard_matrix(n)` exists: n is a power of two, of Paley's orders, or a product of such.

    Of the multiples of 4 up to 300 these have none: 92, 116, 156, 172, 184, 188, 232, 236, 260, 268, 292.
    """
    return _factors(n) is not None


def largest_block(n: int) -> int:
    """The largest divisor of n that has a Hadamard matrix, 1 at least: 4 of 172, and 344 of 344.

    Raises:
        ConfigError: n is not positive.
    """
    if n < 1:
        raise ConfigError(f"n={n} has no divisors; use a positive number")
    divisors = {d for low in range(1, math.isqrt(n) + 1) if n % low == 0 for d in (low, n // low)}
    return next(d for d in sorted(divisors, reverse=True) if has_hadamard(d))


@_constant
def hadamard_factors(n: int) -> tuple[int, ...]:
    """The orders whose matrices' Kronecker product, in this order, is `hadamard_matrix(n)`.

    The last is the power of two, perhaps 1; those before it are of Paley's orders, decreasing. Where n is
    such a product in several ways, it is the one whose transform takes the fewest additions.

    Raises:
        ConfigError: there is no matrix of this order.
    """
    factors = _factors(n)
    if factors is None:
        advice = (
            f"use a block of {largest_block(n)}, which divides it" if n > 0 else "use 1 or more"
        )
        raise ConfigError(f"no construction gives a Hadamard matrix of order n={n}; {advice}")
    return factors


def hadamard_scales(n: int) -> tuple[float, float]:
    """(before, after): their product is 1/√n, `before` a power of two that keeps sums in the range."""
    before = 0.5 ** ((n - 1).bit_length() // 2)
    return before, 1 / (before * math.sqrt(n))


@cache
def _factors(n: int) -> tuple[int, ...] | None:
    if n < 1:
        return None
    if n & (n - 1) == 0:
        return (n,)
    found = []
    for order in range(12, n + 1, 4):
        if n % order == 0 and order & (order - 1) and _paley_field(order) is not None:
            rest = _factors(n // order)
            if rest is not None:
                *paley, power = rest
                found.append((*sorted((order, *paley), reverse=True), power))
    # a power of two takes as many additions for each element as it has factors of 2, others take theirs
    return min(
        found, key=lambda orders: (sum(orders[:-1]) + orders[-1].bit_length(), orders), default=None
    )


def _paley_field(order: int) -> tuple[int, int] | None:
    """(p, m) of the field that gives a matrix of this order; construction I where both would."""
    if order % 4:
        return None
    first = prime_power(order - 1)
    if first is not None:
        return first
    return prime_power(order // 2 - 1) if order % 8 == 4 else None


def hadamard_matrix(n: int) -> Tensor:
    """The Hadamard matrix H of order n, int8 (n, n) on the CPU, elements ±1, H Hᵀ = n I.

    Sources: Sylvester (1867) for powers of two, Paley, "On orthogonal matrices" (1933) for other factors.

    Raises:
        ConfigError: no construction gives one, see `has_hadamard`.
    """
    result = torch.ones(1, 1, dtype=torch.int8, device="cpu")
    *paley, power = hadamard_factors(n)
    for order in paley:
        result = torch.kron(result, _factor(order, result))
    two = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8, device="cpu")
    for _ in range(power.bit_length() - 1):
        result = torch.kron(result, two)
    return result


@_constant
def _field(order: int) -> tuple[int, int]:
    field = _paley_field(order)
    assert field is not None
    return field


@_constant
def _signs(p: int, m: int) -> tuple[int, ...]:
    return quadratic_character(p, m)


def _paley(order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Paley's matrix, by construction I of the field with order - 1 elements, else by II."""
    p, m = _field(order)
    q = p**m
    number = torch.arange(q, dtype=torch.int32, device=device)
    difference = torch.zeros(q, q, dtype=torch.int32, device=device)
    for place in (p**power for power in range(m)):
        digits = number // place % p * place
        step = digits[:, None] - digits
        difference = difference + torch.where(step < 0, step + p * place, step)
    signs = torch.tensor(_signs(p, m), dtype=dtype, device=device)
    signs = signs.index_select(0, difference.reshape(-1)).reshape(q, q)
    ones = torch.ones(1, q, dtype=dtype, device=device)
    first_sign = 1 if q % 4 == 1 else -1  # symmetric, or skew
    corner = torch.zeros(1, 1, dtype=dtype, device=device)
    conference = torch.cat(
        [torch.cat([corner, ones], 1), torch.cat([first_sign * ones.T, signs], 1)]
    )
    diagonal = torch.eye(q + 1, dtype=dtype, device=device)
    if q % 4 == 3:
        return conference + diagonal
    two = torch.tensor([[1, 1], [1, -1]], dtype=dtype, device=device)
    corner = torch.tensor([[1, -1], [-1, -1]], dtype=dtype, device=device)
    return torch.kron(conference, two) + torch.kron(diagonal, corner)


@lru_cache(maxsize=32)
def _kept(order: int, device: torch.device) -> Tensor:
    """Paley's matrix in int8, made once: a transform of few rows takes less time than making it."""
    with neutral():
        return _paley(order, torch.int8, device)


def _factor(order: int, y: Tensor) -> Tensor:
    """Paley's matrix with y's dtype and device; code that is traced has a recipe for it, not a constant."""
    if may_be_compiled(y) or order > _GREATEST_KEPT:
        return _paley(order, y.dtype, y.device)
    return _kept(order, y.device).to(y.dtype)


def hadamard_transform(x: Tensor, block: int) -> Tensor:
    """H x / √block of every `block` consecutive elements of the last dimension, in x's shape and dtype.

    As a product of matrices: x @ (H / √block).T, with H = `hadamard_matrix(block)`, for each block.
    Float64 is computed in float64, all others in float32, and rounded once. Powers of two take butterflies
    from neighbours to the farthest, so they have the same bits everywhere; sums over the other factors are
    in float64. A finite block below the greatest float32 / √block has a finite result in float32.

    Args:
        x: any floating-point tensor with dimensions.
        block: the order of the matrix, a divisor of the last dimension; `largest_block` finds one.

    Raises:
        ConfigError: x is not of a float dtype or has no dimension, or `block` does not divide the last
            one or has no matrix.
    """
    return _transform(x, block, inverse=False)


def inverse_hadamard_transform(x: Tensor, block: int) -> Tensor:
    """Hᵀ x / √block of every `block` consecutive elements, which undoes `hadamard_transform`.

    Arguments, precision and errors are those of `hadamard_transform`.
    """
    return _transform(x, block, inverse=True)


def _transform(x: Tensor, block: int, inverse: bool) -> Tensor:
    if not x.is_floating_point() or x.ndim == 0:
        raise ConfigError(
            f"a Hadamard transform of a {x.ndim}-dimensional tensor of {x.dtype}; use one of a "
            "floating-point dtype with dimensions"
        )
    *paley, power = hadamard_factors(block)
    if x.shape[-1] % block:
        raise ConfigError(
            f"block={block} does not divide the last dimension, {x.shape[-1]}; use "
            f"{largest_block(x.shape[-1])} or another divisor"
        )
    before, after = hadamard_scales(block)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide).contiguous() * before
    blocks = x.numel() // block
    for _ in range(power.bit_length() - 1):
        # the lowest bit of the position goes to the top: after all rounds each is where it was
        pairs = y.reshape(blocks * (block // power), power // 2, 2)
        even, odd = pairs.unbind(-1)
        y = torch.cat([even + odd, even - odd], -1)
    if paley:
        y = y.to(torch.float64)
    inner = power
    for order in reversed(paley):
        matrix = _factor(order, y)
        y = (matrix.T if inverse else matrix) @ y.reshape(
            blocks * block // (order * inner), order, inner
        )
        inner *= order
    return (y * after).reshape(x.shape).to(x.dtype)

"""Quadratic characters of finite fields, the signs that Paley's matrices are made of.

An element of the field with q = p**m elements is a polynomial of degree below m with coefficients in
0 … p - 1, and is numbered by its value at p: element 5 of the field with 9 elements is x + 2.
"""

from __future__ import annotations

from functools import cache
from itertools import product

__all__ = ["prime_power", "quadratic_character"]


@cache
def prime_power(q: int) -> tuple[int, int] | None:
    """(p, m) with p prime, m ≥ 1 and p**m == q; None where q is not a power of a prime."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 2) if q % d == 0), q)
    m = 0
    while q % p == 0:
        q //= p
        m += 1
    return (p, m) if q == 1 else None


@cache
def quadratic_character(p: int, m: int) -> tuple[int, ...]:
    """χ of every element of the field with p**m elements, p an odd prime: 0 of zero, else 1 or -1.

    χ is 1 for squares. The even powers of a primitive element are the squares, so the powers of one are
    listed. The element is x, modulo the first primitive polynomial x**m - (c[m-1] x**(m-1) + … + c[0]),
    in increasing order of (c[m-1], …, c[0]).
    """
    for reversed_coefficients in product(range(p), repeat=m):
        powers = _powers_of_x(p, reversed_coefficients[::-1])
        if len(powers) == p**m - 1:
            signs = [0] * p**m
            for exponent, element in enumerate(powers):
                signs[element] = -1 if exponent % 2 else 1
            return tuple(signs)
    raise AssertionError("every finite field has a primitive element")


def _powers_of_x(p: int, coefficients: tuple[int, ...]) -> list[int]:
    """The numbers of 1, x, x², … until 1 comes again, with x**m = Σ coefficients[i] x**i.

    Empty where it never does because x divides its own powers, or where 1 comes too early to count: all
    p**m - 1 elements but zero are there only if x is primitive.
    """
    m = len(coefficients)
    if coefficients[0] == 0:
        return []
    one = (1,) + (0,) * (m - 1)
    element, powers = one, []
    while True:
        powers.append(sum(digit * p**place for place, digit in enumerate(element)))
        top = element[-1]
        shifted = (0, *element[:-1])
        element = tuple((s + top * c) % p for s, c in zip(shifted, coefficients, strict=True))
        if element == one:
            return powers

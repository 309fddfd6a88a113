"""Input steps: what happens to the activations of a matmul before they meet the stored weight.

A format `Spec(..., input=steps)` stores the weight of the *stepped* space. With S the product of the steps,
in their order, ``W x = (W S⁻¹)(S x)``: the parts hold W S⁻¹, and a matmul applies S to x. For one row x of
activations, and one row w of the weight, both of length K:

============  ===========================  =============================
step          x becomes                    w becomes
============  ===========================  =============================
permute       ``x[in_perm]``               ``w[in_perm]``
scale         ``x * in_scale``             ``w / in_scale``
hadamard(b)   ``H x``, block by block      ``H w``, block by block
============  ===========================  =============================

H is an orthonormal Hadamard matrix of b × b; see `ao_core.numerics.hadamard_transform`.

A step of another kind, low_rank(r), leaves x as it is and takes a matrix of rank r out of the weight: W
becomes W - B A, and B A x is added to the product. B (N, r) and A (r, K) are in 16 bits, and x is not
quantized for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.arguments import check_fields
from ao_core.errors import ConfigError
from ao_core.schema import Fields, Number, Text

__all__ = [
    "LOW_RANK",
    "PERMUTE",
    "ROW_STEPS",
    "SCALE",
    "STEP_FIELDS",
    "STEP_KINDS",
    "Step",
    "check_kinds",
    "check_steps",
    "hadamard_step",
    "low_rank_step",
]

#: steps that change rows of activations
ROW_STEPS = ("permute", "scale", "hadamard")
#: the one that takes part of the weight out
LOW_RANK = "low_rank"
#: what `Step.kind` may be
STEP_KINDS = (*ROW_STEPS, LOW_RANK)
#: kinds with a number
_NUMBERED = ("hadamard", LOW_RANK)


@dataclass(frozen=True)
class Step:
    """One input step of a `Spec`, as primitives: `PERMUTE`, `SCALE`, or what functions here return."""

    #: one of `STEP_KINDS`
    kind: str
    #: "hadamard": elements of one block, which must divide K; "low_rank": the rank; of other kinds 0
    block: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_kinds((self.kind,), "kind")
        if (self.kind in _NUMBERED) != (self.block > 0):
            wanted = "a positive number" if self.kind in _NUMBERED else "0"
            raise ConfigError(f"block={self.block} of the input step {self.kind!r}; use {wanted}")

    def __str__(self) -> str:
        return f"{self.kind}({self.block})" if self.block else self.kind


#: what a step in a file must be; `Step` checks the rest
STEP_FIELDS = Fields(
    {"kind": Text("|".join(STEP_KINDS), f"one of {', '.join(STEP_KINDS)}")},
    {"block": Number(0, 1 << 48)},
    closed=True,
)


def hadamard_step(block: int) -> Step:
    """Multiplies each `block` elements of a row by an orthonormal Hadamard matrix.

    Raises:
        ConfigError: `block` is not positive.
    """
    return Step("hadamard", block)


def low_rank_step(rank: int) -> Step:
    """Takes a matrix of this rank out of the weight, whose product is added in high precision.

    Raises:
        ConfigError: `rank` is not positive.
    """
    return Step(LOW_RANK, rank)


def check_kinds(kinds: tuple[str, ...], name: str) -> None:
    """Raise `ConfigError` for a kind of input step that does not exist; `name` is the parameter."""
    for kind in kinds:
        if kind not in STEP_KINDS:
            raise ConfigError(
                f"{name}={kind!r} is not a kind of input step; there are {', '.join(STEP_KINDS)}"
            )


def check_steps(steps: tuple[Step, ...]) -> None:
    """Raise `ConfigError` where two steps are of one kind, since each kind has one part."""
    kinds = [step.kind for step in steps]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"input=({', '.join(map(str, steps))}) has {kinds.count(twice)} steps of kind {twice!r}; a "
            "format has at most one step of each kind, in any order"
        )


#: permutes the elements of each row of activations by the part `in_perm`
PERMUTE = Step("permute")
#: multiplies each row of activations by the part `in_scale`
SCALE = Step("scale")

"""pot4: a sign and a power of two in 4 bits, so that a multiplication is a shift."""

from dataclasses import dataclass

from ao_core import (
    Config,
    Recipe,
    Spec,
    Transform,
    codebook_dtype,
    hookimpl,
    quantize_tensor,
)

# the magnitudes 1, 1/2, … 1/64 of both signs, 0, and 1/128 in the code that is left
POWERS = [2.0**-e for e in range(7)]
POT4 = codebook_dtype("pot4", sorted([*(-p for p in POWERS), 0.0, 2.0**-7, *POWERS]))


@dataclass(frozen=True)
class Pot4Config(Config):
    """Weights in pot4, packed two a byte, with a bfloat16 scale for `group_size` of them."""

    group_size: int = 32


def apply(weight, config, target):
    spec = Spec(
        "pot4", block=(1, config.group_size), scale_dtype="bfloat16", layout="packed"
    )
    return quantize_tensor(weight, spec)


@hookimpl
def ao_api():
    return (0, 1)


@hookimpl
def ao_dtypes():
    return [POT4]


@hookimpl
def ao_transforms():
    return [Transform(Pot4Config, "pot4_weight_only", version=1, apply=apply)]


@hookimpl
def ao_recipes():
    return [Recipe("pot4_weight_only", Pot4Config(), "powers of two in groups of 32")]

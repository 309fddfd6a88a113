"""pot4: a sign and a power of two in 4 bits, so that a multiplication is a shift."""

from ao_core import Recipe, WeightOnlyConfig, hookimpl, lut_dtype

# the magnitudes 1, 1/2, … 1/64 of both signs, 0, and 1/128 in the code that is left
POWERS = [2.0**-e for e in range(7)]
POT4 = lut_dtype("pot4", sorted([*(-p for p in POWERS), 0.0, 2.0**-7, *POWERS]))


@hookimpl
def ao_api():
    return (0, 1)


@hookimpl
def ao_dtypes():
    return [POT4]


@hookimpl
def ao_recipes():
    config = WeightOnlyConfig("pot4", group_size=32, scale_dtype="bfloat16")
    return [Recipe("pot4_weight_only", config, "powers of two in groups of 32")]

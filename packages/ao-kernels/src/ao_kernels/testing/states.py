"""The number formats of optimizers' states, which ao-optim has, for whatever looks at kernels without it."""

from __future__ import annotations

from ao_core import lut_dtype, register, reopen
from ao_core.numerics import companded_values, dynamic_values, unsigned_float_values
from ao_core.registry import registry

__all__ = ["register_states"]

_VALUES = {
    "dynamic8": dynamic_values(8, signed=True),
    "dynamic8u": dynamic_values(8, signed=False),
    "companded8": companded_values(signed=True),
    "companded8u": companded_values(signed=False),
    "f8e5m3u": unsigned_float_values(),
}


def register_states() -> None:
    """Register those that nobody has registered."""
    for name, values in _VALUES.items():
        if name not in registry.dtypes:
            reopen()
            register(lut_dtype(name, values))

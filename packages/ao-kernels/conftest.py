"""What the tests and the proofs of this package share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# `ao_triton_checks`, which no wheel holds, and `kernel_checks`, the checks of this package's kernels
sys.path += [str(Path(__file__).parent / name) for name in ("checks", "proofs")]


@pytest.fixture(scope="module")
def optimizer_states() -> None:
    """The dtypes of optimizer states are registered, also where ao-optim, which has them, is absent."""
    from ao_core import lut_dtype, register, reopen
    from ao_core.ext import registry
    from ao_core.ext.numerics import companded_values, dynamic_values, unsigned_float_values

    values = {
        "dynamic8": dynamic_values(8, signed=True),
        "dynamic8u": dynamic_values(8, signed=False),
        "companded8": companded_values(signed=True),
        "companded8u": companded_values(signed=False),
        "f8e5m3u": unsigned_float_values(),
    }
    for name, numbers in values.items():
        if name not in registry.dtypes:
            reopen()
            register(lut_dtype(name, numbers))

"""What the Triton kernels may cost, compiled as they are launched: `nox -s gpu_proofs` checks."""

from __future__ import annotations

from ao_triton_checks.limits import Check
from kernel_checks import (
    adam,
    attend,
    cast,
    fake_quantize,
    hadamard,
    rows,
    scaled_mm,
    sparse,
    trellis,
    w4a8,
    weight_only,
)

__all__ = ["CHECKS"]

_FAMILIES = (
    weight_only,
    adam,
    fake_quantize,
    cast,
    rows,
    scaled_mm,
    w4a8,
    sparse,
    hadamard,
    attend,
    trellis,
)
CHECKS: tuple[Check, ...] = tuple(check for family in _FAMILIES for check in family.CHECKS)

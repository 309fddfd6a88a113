"""What the Triton kernels may cost, compiled as they are launched: `nox -s gpu_proofs` checks."""

from __future__ import annotations

from ao_kernels.testing.gates import Gate
from ao_kernels.triton.gates import (
    adam,
    blocks,
    cast,
    hadamard,
    linear,
    plane32,
    rows,
    scaled,
    sparse,
)

__all__ = ["GATES", "MORE"]

_FAMILIES = (linear, adam, blocks, cast, rows, scaled, plane32, sparse, hadamard)
#: those that CI checks in every change
GATES: tuple[Gate, ...] = tuple(gate for family in _FAMILIES for gate in family.GATES)
#: the rest
MORE: tuple[Gate, ...] = tuple(gate for family in _FAMILIES for gate in family.MORE)

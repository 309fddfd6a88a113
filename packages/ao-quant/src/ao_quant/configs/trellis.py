"""The configuration of weights on a trellis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ao_core import Spec
from ao_core.ext import WeightConfig, WeightFormat, hadamard_step, matrix_spec
from ao_core.ext.numerics import TRELLIS_BITS
from ao_quant.configs.base import one_of

__all__ = ["TrellisWeightOnlyConfig"]

#: the greatest block of the rotation
_BLOCK = 1024


@dataclass(frozen=True)
class TrellisWeightOnlyConfig(WeightConfig):
    """Weights in 2, 3 or 4 bits that are a path through a trellis, with one bfloat16 scale per row.

    The value of a weight follows from the last 12 bits of its column, so a column is rounded as a whole, to
    the nearest path. Values are those of a normal distribution; a Hadamard transform of the inputs, in blocks
    of a power of two, makes weights that are not distributed so alike.
    `GPTQConfig(TrellisWeightOnlyConfig())` lets columns make up for the errors of those before them.

    References: Tseng et al. 2024 (QTIP, arXiv:2406.11235); `ao_core.ext.numerics.encode_trellis` has the
    format.
    """

    #: one of 2, 3 and 4
    bits: int = 2
    #: whether weights and inputs are rotated
    rotate: bool = True

    def __post_init__(self) -> None:
        one_of(self, "bits", TRELLIS_BITS)
        one_of(self, "rotate", (True, False))

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now; without the rotation, which depends on the shape."""
        options = (("scale_rule", "absmean"),)
        spec = matrix_spec(f"int{self.bits}", "row", "bfloat16", layout="trellis", options=options)
        return WeightFormat(spec, matrices_only=True)

    def spec(self, shape: tuple[int, ...], dtype: torch.dtype, *, conv: bool = False) -> Spec:
        """The `Spec` of a weight of this shape and dtype, with the rotation."""
        return self.rotated(super().spec(shape, dtype, conv=conv), shape[-1])

    def rotated(self, spec: Spec, columns: int) -> Spec:
        """The format with the rotation of rows of so many columns."""
        block = min(columns & -columns, _BLOCK) if self.rotate else 1
        return replace(spec, input=(hadamard_step(block),)) if block > 1 else spec

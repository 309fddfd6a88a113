"""The configuration of the block formats of GGUF."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ao_core import Spec
from ao_core.ext import WeightConfig, WeightFormat, matrix_spec
from ao_quant.configs.base import one_of

__all__ = ["FILE_TYPES", "GGUF_TYPES", "GGUFWeightOnlyConfig", "gguf_spec"]


def _super(numbers: str, count: int, layout: str = "packed") -> Spec:
    """Scales in integers, `count` of which share a float16 scale: a super-block."""
    return Spec(numbers, (1, count), "float16", layout=layout)


#: type of ggml -> number format, weights in a block, storage of their scale, kind of their zero point
_TYPES: dict[str, tuple[str, int, str | Spec, str]] = {
    "q4_0": ("int4", 32, "float16", "none"),
    "q4_1": ("uint4", 32, "float16", "offset"),
    "q5_0": ("int5", 32, "float16", "none"),
    "q5_1": ("uint5", 32, "float16", "offset"),
    "q8_0": ("int8", 32, "float16", "none"),
    "q2_k": ("uint2", 16, _super("uint4", 16), "offset"),
    "q3_k": ("int3", 16, _super("int6", 16), "none"),
    "q4_k": ("uint4", 32, _super("uint6", 8), "offset"),
    "q5_k": ("uint5", 32, _super("uint6", 8), "offset"),
    "q6_k": ("int6", 16, _super("int8", 16, "plain"), "none"),
    "iq4_nl": ("iq4_nl", 32, "float16", "none"),
    "mxfp4": ("f4e2m1", 32, "e8m0", "none"),
}
#: the types of ggml that files hold
FILE_TYPES = tuple(_TYPES)
#: those that `GGUFWeightOnlyConfig` makes; MXFP4 is a format of its own, which `MXWeightOnlyConfig` makes
GGUF_TYPES = tuple(kind for kind in FILE_TYPES if kind != "mxfp4")


def gguf_spec(kind: str) -> Spec:
    """The format of a matrix in a GGUF type: the numbers that ggml stores, as parts of a `QTensor`."""
    numbers, size, scale, zero_point = _TYPES[kind]
    return matrix_spec(numbers, size, scale, zero_point)


@dataclass(frozen=True)
class GGUFWeightOnlyConfig(WeightConfig):
    """Weights in a block format of llama.cpp, as `ao_quant.gguf.write_gguf` stores them.

    Blocks of 32 with a float16 scale ("q4_0", "q5_0", "q8_0", "iq4_nl") and a minimum ("q4_1", "q5_1"), or
    super-blocks of 256 whose scales are integers too (the others).
    """

    #: one of `GGUF_TYPES`
    type: str = "q4_k"

    def __post_init__(self) -> None:
        one_of(self, "type", GGUF_TYPES)

    def weight_format(self, dtype: torch.dtype) -> WeightFormat:
        """The format of weights that are in `dtype` now."""
        return WeightFormat(gguf_spec(self.type))

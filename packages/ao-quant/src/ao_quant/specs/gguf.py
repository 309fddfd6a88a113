"""Formats of the blocks of GGUF: the numbers that ggml stores, in the parts of a `QTensor`."""

from __future__ import annotations

from ao_core.spec import Spec
from ao_core.weights import WeightFormat
from ao_quant import configs as c
from ao_quant.specs.base import format_of

__all__ = ["GGUF_FORMATS"]


def _nested(dtype: str, count: int, layout: str = "packed") -> Spec:
    """Scales in integers, `count` of which share a float16 scale: a super-block."""
    return Spec(dtype, (1, count), "float16", layout=layout)


#: GGUF type -> format of a weight
GGUF_FORMATS: dict[str, WeightFormat] = {
    "q4_0": WeightFormat("int4", 32, "float16"),
    "q4_1": WeightFormat("uint4", 32, "float16", "offset"),
    "q5_0": WeightFormat("int5", 32, "float16"),
    "q5_1": WeightFormat("uint5", 32, "float16", "offset"),
    "q8_0": WeightFormat("int8", 32, "float16"),
    "q2_k": WeightFormat("uint2", 16, _nested("uint4", 16), "offset"),
    "q3_k": WeightFormat("int3", 16, _nested("int6", 16)),
    "q4_k": WeightFormat("uint4", 32, _nested("uint6", 8), "offset"),
    "q5_k": WeightFormat("uint5", 32, _nested("uint6", 8), "offset"),
    "q6_k": WeightFormat("int6", 16, _nested("int8", 16, "plain")),
    "iq4_nl": WeightFormat("iq4_nl", 32, "float16"),
}


@format_of.register
def _(config: c.GGUFWeightOnlyConfig) -> WeightFormat:
    return GGUF_FORMATS[config.type]

"""The configuration of the block formats of GGUF."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.config import Config
from ao_quant.configs.base import one_of

__all__ = ["GGUF_TYPES", "GGUFWeightOnlyConfig"]

#: the types of ggml that weights can have
GGUF_TYPES = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl",
)  # fmt: skip


@dataclass(frozen=True)
class GGUFWeightOnlyConfig(Config):
    """Weights in a block format of llama.cpp, as `ao_quant.gguf.write_gguf` stores them.

    Blocks of 32 with a float16 scale ("q4_0", "q5_0", "q8_0", "iq4_nl") and a minimum ("q4_1", "q5_1"), or
    super-blocks of 256 whose scales are integers too (the others).
    """

    #: one of `GGUF_TYPES`
    type: str = "q4_k"

    def __post_init__(self) -> None:
        one_of(self, "type", GGUF_TYPES)

"""From a configuration and the shape of a weight to the `Spec` of the quantized tensor."""

from __future__ import annotations

from ao_quant.specs import (  # noqa: F401  they register the formats of their family
    codebooks,
    floats,
    gguf,
    ints,
    mx,
    static,
)
from ao_quant.specs.base import format_of, spec_of

__all__ = ["format_of", "spec_of"]

"""`QTensor`, and the functions that make and change them."""

from __future__ import annotations

from ao_core.tensor import (  # noqa: F401  they fill the tables
    collectives,
    convolutions,
    experts,
    matmuls,
    memory,
    rules,
    transformed_matmuls,
    writes,
)
from ao_core.tensor.checks import check_quantizable
from ao_core.tensor.create import quantize_tensor, quantize_values
from ao_core.tensor.encoding import fake_quantize
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import repack, to_canonical, to_layout
from ao_core.tensor.tables import function, rule
from ao_core.tensor.updates import STOCHASTIC, stochastic_rounding
from ao_core.tensor.wrapper import dense_memory, is_converted

__all__ = [
    "STOCHASTIC",
    "QTensor",
    "check_quantizable",
    "dense_memory",
    "fake_quantize",
    "function",
    "is_converted",
    "quantize_tensor",
    "quantize_values",
    "repack",
    "rule",
    "stochastic_rounding",
    "to_canonical",
    "to_layout",
]

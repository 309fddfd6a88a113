"""The two tensor subclasses, and the functions that make and change them."""

from __future__ import annotations

from ao_core.tensor import (  # noqa: F401  they fill the tables
    collectives,
    compute_experts,
    compute_methods,
    experts,
    memory,
    products,
    rules,
    transformed_products,
    writes,
)
from ao_core.tensor.compute import ComputeWeight, dense_memory
from ao_core.tensor.create import (
    check_quantizable,
    fake_quantize,
    quantize_tensor,
    quantize_values,
)
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import repack, to_canonical, to_layout
from ao_core.tensor.rotation import hadamard
from ao_core.tensor.straight_through import straight_through
from ao_core.tensor.tables import function, rule
from ao_core.tensor.updates import STOCHASTIC, stochastic_rounding

__all__ = [
    "STOCHASTIC",
    "ComputeWeight",
    "QTensor",
    "check_quantizable",
    "dense_memory",
    "fake_quantize",
    "function",
    "hadamard",
    "quantize_tensor",
    "quantize_values",
    "repack",
    "rule",
    "stochastic_rounding",
    "straight_through",
    "to_canonical",
    "to_layout",
]

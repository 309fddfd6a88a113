"""The two tensor subclasses, and the functions that make and change them."""

from __future__ import annotations

import torch

from ao_core.spec import Spec
from ao_core.tensor import collectives, experts, products, rules  # noqa: F401  they fill the tables
from ao_core.tensor.compute import ComputeWeight
from ao_core.tensor.create import check_quantizable, fake_quantize, quantize_tensor
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import native, to_canonical, to_layout
from ao_core.tensor.tables import function, rule

__all__ = [
    "ComputeWeight",
    "QTensor",
    "check_quantizable",
    "fake_quantize",
    "function",
    "native",
    "quantize_tensor",
    "rule",
    "to_canonical",
    "to_layout",
]

torch.serialization.add_safe_globals([QTensor, ComputeWeight, Spec])

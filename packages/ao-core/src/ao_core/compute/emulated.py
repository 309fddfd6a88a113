"""Casts that are one node of a compiled graph, where Inductor's loops cannot hold what they consist of."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from ao_core.spec import Spec
from ao_core.tensor.encoding import fake_quantize
from ao_core.tensor.qtensor import QTensor

__all__ = ["cast_values", "is_one_node"]


def is_one_node(x: Tensor, spec: Spec) -> bool:
    """Whether a cast of `x` must not be fused with others while it is traced.

    With quantized scales a cast ends in loops over single elements. Inductor's C++ backend fuses those of
    all operands with as many elements, and asserts that their blocks are split alike (torch 2.13,
    `CppScheduling.try_loop_split`), which holds for square matrices only.
    """
    from torch._subclasses.fake_tensor import is_fake

    if isinstance(x, QTensor) or x.device.type != "cpu":
        return False
    return isinstance(spec.scale_dtype, Spec) and is_fake(x)


def cast_values(x: Tensor, spec: Spec) -> Tensor:
    """`fake_quantize`, as one node of the graph where `is_one_node`."""
    if is_one_node(x, spec):
        return _cast(x, json.dumps(spec.to_dict()))  # type: ignore[no-any-return]
    return fake_quantize(x, spec)


@torch.library.custom_op("ao_core::cast_values", mutates_args=())
def _cast(x: Tensor, spec: str) -> Tensor:
    """`fake_quantize` of a matrix; the format is in JSON, so that compiled graphs can be kept on disk."""
    return fake_quantize(x.contiguous(), Spec.from_dict(json.loads(spec))).contiguous()


@_cast.register_fake
def _(x: Tensor, spec: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

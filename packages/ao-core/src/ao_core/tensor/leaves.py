"""`Leaves`: a quantized tensor as a record of plain tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_core.numerics import grid_shape
from ao_core.spec import Spec
from ao_core.tensor.qtensor import QTensor

__all__ = ["Leaves", "spec_of_text"]


@dataclass(frozen=True)
class Leaves:
    """A `QTensor` as the plain tensors that hold its memory, which compiled code can take and write.

    Dynamo does not look into a tensor subclass; a record of plain tensors becomes inputs of its graph.
    """

    #: in the order of `QTensor.leaves`
    leaves: tuple[Tensor, ...]
    #: their names: "qdata", "scale", …
    names: tuple[str, ...]
    #: the format
    spec: Spec
    #: of the tensor
    shape: tuple[int, ...]
    #: the logical dtype
    dtype: torch.dtype
    #: the spec in JSON, an argument of custom ops
    text: str

    @classmethod
    def of(cls, tensor: QTensor) -> Leaves:
        """Those of a tensor that is not permuted; they share its memory."""
        names, leaves = zip(*tensor.leaves(), strict=True)
        text = json.dumps(tensor.spec.to_dict(), sort_keys=True)
        return cls(leaves, names, tensor.spec, tensor.stored_shape, tensor.dtype, text)

    def tensor(self) -> QTensor:
        """The tensor, around the same memory. Always the same one: kernels keep with it what they find."""
        return self._tensor

    def __getstate__(self) -> dict[str, Any]:
        """Without the tensor: a deep copy must not have one around other memory than its own."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _tensor(self) -> QTensor:
        found = dict(zip(self.names, self.leaves, strict=True))
        with torch.inference_mode(False):  # it may outlive the mode it is first asked for in
            return _rebuilt(found, self.spec, self.shape, self.dtype)

    def with_leaves(self, leaves: tuple[Tensor, ...], shape: tuple[int, ...]) -> Leaves:
        """The same around other tensors."""
        return Leaves(leaves, self.names, self.spec, shape, self.dtype, self.text)


def _rebuilt(
    leaves: dict[str, Tensor], spec: Spec, shape: tuple[int, ...], dtype: torch.dtype
) -> QTensor:
    parts: dict[str, Tensor] = {}
    nested: dict[str, dict[str, Tensor]] = {}
    for name, leaf in leaves.items():
        part, _, rest = name.partition(".")
        if rest:
            nested.setdefault(part, {})[rest] = leaf
        else:
            parts[part] = leaf
    for part, inner in nested.items():
        assert isinstance(spec.scale_dtype, Spec)
        grid = grid_shape(shape, spec.block)
        parts[part] = _rebuilt(inner, spec.scale_dtype, grid, torch.float32)
    return QTensor(parts, spec, shape, dtype)


@lru_cache(maxsize=64)
def spec_of_text(text: str) -> Spec:
    """The spec of `Leaves.text`."""
    return Spec.from_dict(json.loads(text))

"""`Wrapper`: a tensor around dense memory that decides itself how it is multiplied.

`ao_core.compute` brings the one there is, `ComputeWeight`. What `QTensor`, saving and reports must know of
it is declared here, so that nothing in `ao_core.tensor` imports what is built on top of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from torch import Tensor

from ao_core.tensor.tables import is_quantized

if TYPE_CHECKING:
    from ao_core.tensor.qtensor import QTensor

__all__ = ["Wrapper", "dense_memory", "is_converted"]


class Wrapper(Tensor):
    """A tensor subclass with the shape, dtype and device of its `memory`.

    Torch asks it, and not a `QTensor` of activations beside it, what a function of both gives.
    """

    memory: Tensor

    def like(self, memory: Tensor) -> Wrapper:
        """The same around other memory."""
        raise NotImplementedError

    def summary(self) -> str:
        """How it is multiplied, in a few words, for `print(model)` and reports."""
        raise NotImplementedError


def dense_memory(tensor: Tensor) -> Tensor:
    """What a `Wrapper` holds; any other tensor itself."""
    return tensor.memory if isinstance(tensor, Wrapper) else tensor


Converted: TypeAlias = "QTensor | Wrapper"


def is_converted(tensor: object) -> TypeGuard[Converted]:
    """Whether a tensor is one of ao's: quantized, or with matmuls of its own."""
    return is_quantized(tensor) or isinstance(tensor, Wrapper)

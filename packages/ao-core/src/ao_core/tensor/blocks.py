"""What the ops of decoder blocks, `qkv` and `mlp`, are told: weights, norms, heads, and their call type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.dispatch import PIN, name_kernel, select
from ao_core.records import Kernel
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.qtensor import QTensor

__all__ = ["GAINS", "GATES", "BlockCall", "BlockOp", "Heads", "NormBefore", "Projection"]

#: how a norm multiplies by its weight w, with h = x / rms(x) in float32. "rounded": round(h) * w, both in the
#: dtype of x; "direct": round(h * w); "plus_one": round(h * (1 + w))
GAINS = ("rounded", "direct", "plus_one")
#: activation functions of the gate
GATES = ("silu", "gelu_tanh")


class Projection(NamedTuple):
    """A linear layer: weight (N, K), and bias (N,) or None."""

    weight: QTensor
    bias: Tensor | None = None


class NormBefore(NamedTuple):
    """An RMS norm over the last dimension."""

    #: (K,), in the dtype of x
    weight: Tensor
    #: added to the mean of the squares
    eps: float
    #: one of `GAINS`
    gain: str


class Heads(NamedTuple):
    """How many heads of queries, and of keys and of values, and the elements of each."""

    query: int
    key: int
    dim: int


@dataclass(frozen=True)
class BlockCall:
    """A call of `qkv` or `mlp`: an `OpCall`."""

    #: "qkv" or "mlp"
    op: str
    #: of each weight, in the order of the op's parameters: the format, and (N, K)
    weights: tuple[tuple[Spec, tuple[int, ...]], ...]
    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    device: str
    #: one of `GATES`; of `qkv` empty
    gate: str = ""

    @property
    def layout(self) -> str:
        """That of the first weight."""
        return self.weights[0][0].layout

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The formats of all weights."""
        return tuple(spec for spec, _ in self.weights)


class BlockOp:
    """`qkv` or `mlp` with certain weights: finds the kernel of each kind of call once."""

    #: kinds of call whose kernel is remembered before it starts over
    _MAX_FOUND = 256

    def __init__(self, op: str, weights: tuple[QTensor, ...], gate: str = "") -> None:
        """Remember what is the same in all calls.

        Args:
            op: "qkv" or "mlp".
            weights: in the order of the op's parameters.
            gate: one of `GATES`, for "mlp".
        """
        self._op, self._weights, self._gate = op, weights, gate
        self._found: dict[Any, Kernel] = {}

    def __call__(self, x: Tensor, *arguments: Any) -> Any:
        """What the kernel for `x` returns. `arguments` are all others of the op, weights too."""
        key = (x.shape, x.dtype, PIN.get(), registry.epoch)
        kernel = self._found.get(key)
        if kernel is None:
            if len(self._found) >= self._MAX_FOUND:
                self._found.clear()
            kernel = self._found[key] = select(self.call_of(x))
        try:
            return kernel.fn(x, *arguments)
        except Exception as error:
            name_kernel(error, kernel)
            raise

    def call_of(self, x: Tensor) -> BlockCall:
        """What kernels may see of a call with activations `x`."""
        shapes = tuple((w.spec, w.stored_shape) for w in self._weights)
        shape, device = tuple(x.shape), x.device.type
        return BlockCall(self._op, shapes, shape, x.dtype, device, self._gate)

"""Consecutive decoder blocks over a cache, for a few tokens: what the op `decoder` gets, and its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.dispatch import PIN, name_kernel, select
from ao_core.records import Kernel
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.attention import Attention
from ao_core.tensor.blocks import Heads, NormBefore, Projection
from ao_core.tensor.qtensor import QTensor

__all__ = ["CachedBlock", "CachedBlocks", "Decoded", "DecoderCall", "KeysAndValues", "OutputHead"]


class KeysAndValues(NamedTuple):
    """The cache of one block, as the op `attend` reads it."""

    #: (B, Hkv, S, D), quantized
    key: QTensor
    value: QTensor
    #: int64 (2,): how many tokens there are, and how many of them are in `key` and `value`
    counts: Tensor
    #: (B, Hkv, R, D), contiguous: token p is in slot p % R
    tail_key: Tensor
    tail_value: Tensor
    #: float32 (B, Hkv, 1, D), or None
    center: Tensor | None


class CachedBlock(NamedTuple):
    """A decoder block and its cache: the arguments of `qkv`, of `attend` and of `mlp`."""

    before: NormBefore | None
    inputs: Projection
    heads: Heads
    cache: KeysAndValues
    #: (Hq,), or None
    sinks: Tensor | None
    attention: Attention
    output: Projection
    norm: NormBefore | None
    gate_up: Projection
    down: Projection
    #: one of `GATES`
    gate: str

    @property
    def weights(self) -> tuple[QTensor, ...]:
        """Those of the four matmuls."""
        return tuple(p.weight for p in (self.inputs, self.output, self.gate_up, self.down))


class OutputHead(NamedTuple):
    """What follows the last block: a norm, and the linear layer that makes logits."""

    norm: NormBefore | None
    projection: Projection


class Decoded(NamedTuple):
    """What a call of `decoder` makes."""

    #: (blocks, B, T, K), what each block returns
    blocks: Tensor
    #: (B, T, N), of the head; N is 0 where there is none
    logits: Tensor


@dataclass(frozen=True)
class DecoderCall:
    """A call of `decoder`: an `OpCall`."""

    #: of each block, of its weights: the format, and (N, K)
    weights: tuple[tuple[tuple[Spec, tuple[int, ...]], ...], ...]
    #: of each block: the formats of keys and of values
    caches: tuple[tuple[Spec, Spec], ...]
    #: (B, Hkv, S, D) of the keys of each block
    key_shapes: tuple[tuple[int, ...], ...]
    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    device: str
    #: the weight of the head: the format, and (N, K); None: there is no head
    head: tuple[Spec, tuple[int, ...]] | None = None
    op: str = "decoder"

    @property
    def layout(self) -> str:
        """That of the first weight."""
        return self.weights[0][0][0].layout

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The formats of all weights; those of `caches` are for kernels to judge, with their input steps."""
        found = [spec for block in self.weights for spec, _ in block]
        return (*found, self.head[0]) if self.head else tuple(found)


class CachedBlocks:
    """`decoder` with certain blocks, caches and head: finds the kernel of each kind of call once."""

    #: kinds of call whose kernel is remembered before it starts over
    _MAX_FOUND = 64

    def __init__(self, blocks: tuple[CachedBlock, ...], head: OutputHead | None = None) -> None:
        self.blocks, self.head = blocks, head
        #: what kernels keep: tensors of the blocks are written to, but never replaced
        self.bound: dict[str, Any] = {}
        self._found: dict[Any, Kernel] = {}

    def __call__(
        self, x: Tensor, cosine: Tensor, sine: Tensor, start: Tensor | None, stop: Tensor | None
    ) -> Decoded:
        """What each block returns, and the logits; the tokens are in the caches then.

        Args:
            x: (B, T, K), the next T tokens.
            cosine: (B or 1, T, R) in the dtype of x; see `qkv`.
            sine: likewise.
            start: int64 (B,), or None; see `attend`.
            stop: likewise.
        """
        kernel = self._kernel_of(x)
        try:
            return kernel.fn(x, self, cosine, sine, start, stop)  # type: ignore[no-any-return]
        except Exception as error:
            name_kernel(error, kernel)
            raise

    def has_kernel(self, x: Tensor) -> bool:
        """Whether anything but the reference, which is slower than the ops that it is made of, serves."""
        return self._kernel_of(x).layout != "*"

    def _kernel_of(self, x: Tensor) -> Kernel:
        key = (x.shape, x.dtype, PIN.get(), registry.epoch)
        kernel = self._found.get(key)
        if kernel is None:
            if len(self._found) >= self._MAX_FOUND:
                self._found.clear()
            kernel = self._found[key] = select(self.call_of(x))
        return kernel

    def call_of(self, x: Tensor) -> DecoderCall:
        """What kernels may see of a call with activations `x`."""
        head = None if self.head is None else self.head.projection.weight
        return DecoderCall(
            tuple(tuple((w.spec, w.stored_shape) for w in b.weights) for b in self.blocks),
            tuple((b.cache.key.spec, b.cache.value.spec) for b in self.blocks),
            tuple(tuple(b.cache.key.shape) for b in self.blocks),
            tuple(x.shape),
            x.dtype,
            x.device.type,
            None if head is None else (head.spec, head.stored_shape),
        )

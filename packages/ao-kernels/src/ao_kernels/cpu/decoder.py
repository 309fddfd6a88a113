"""The kernel of `decoder` for weights in tiles: consecutive blocks in one call into C++."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ao_core import Kernel
from ao_core.ext import ConfigError
from ao_core.ext.kernels import (
    GAINS,
    GATES,
    CachedBlock,
    CachedBlocks,
    Decoded,
    DecoderCall,
    NormBefore,
    OutputHead,
    Projection,
)
from ao_kernels.cpu.attend import arguments_of, refuses_stored
from ao_kernels.cpu.blocks import NAMES, weight_arguments
from ao_kernels.cpu.library import isa, unavailable, want_alone
from ao_kernels.cpu.linear import DTYPES

__all__ = ["DECODER_KERNELS"]

#: where `CachedBlocks` keep what the op is told of them
_KEY = "ao_kernels.cpu.decoder"


class _Arguments(NamedTuple):
    """Sizes, and what there is of all blocks and of the head, as csrc/torch/decoder.cpp reads it."""

    tensors: list[Tensor]
    #: what calls write to: counts and the two tails of each block
    caches: list[Tensor]
    numbers: list[int]
    reals: list[float]

    def norm(self, norm: NormBefore | None) -> None:
        """A gain, or -1 for no norm; epsilon; the weight."""
        self.numbers.append(-1 if norm is None else GAINS.index(norm.gain))
        self.reals.append(0.0 if norm is None else norm.eps)
        self.some(None if norm is None else norm.weight)

    def some(self, *tensors: Tensor | None) -> int:
        """Tensors, but for those that are None; returns which are there, in bits."""
        self.tensors.extend(x for x in tensors if x is not None)
        return sum(1 << i for i, x in enumerate(tensors) if x is not None)

    def weight(self, projection: Projection) -> None:
        """Which tensors there are, six numbers, and the tensors."""
        *tensors, numbers = weight_arguments(projection)
        self.numbers.extend((self.some(*tensors), *numbers))

    def block(self, block: CachedBlock) -> None:
        """All of a block."""
        cache, attention = block.cache, block.attention
        self.numbers.extend(block.heads)
        self.norm(block.before)
        self.weight(block.inputs)
        self.weight(block.output)
        self.norm(block.norm)
        self.weight(block.gate_up)
        self.weight(block.down)
        (*keys, key_factors), key_block = arguments_of(cache.key)
        (*values, value_factors), value_block = arguments_of(cache.value)
        sinks = None if block.sinks is None else block.sinks.float()
        given = (keys[2], values[2], cache.center, sinks)
        there = sum(1 << i for i, x in enumerate(given) if x is not None)
        self.numbers.extend((GATES.index(block.gate), attention.causal, attention.window, there))
        self.numbers.extend(map(int, (*key_block, *value_block)))
        for factors in (key_factors, value_factors):
            self.numbers.extend((len(factors), *factors))
        self.reals.extend((attention.scale, attention.softcap))
        self.some(*keys, *values, cache.center, sinks)
        self.caches.extend((cache.counts, cache.tail_key, cache.tail_value))

    def head(self, head: OutputHead) -> None:
        """All of it."""
        self.norm(head.norm)
        self.weight(head.projection)


class _Plan(NamedTuple):
    """What C++ has read of blocks and a head, and what the op is told of it."""

    plan: Tensor
    blocks: int
    columns: int


def _plan(blocks: CachedBlocks) -> _Plan:
    """Made once, and forgotten with the blocks."""
    found: _Plan | None = blocks.bound.get(_KEY)
    if found is None:
        head = blocks.head
        columns = 0 if head is None else head.projection.weight.stored_shape[0]
        width = blocks.blocks[0].output.weight.stored_shape[0]
        given = _Arguments([], [], [columns, width], [])
        # the plan is no part of what is recorded, and outlives it
        with _disable_current_modes(), torch.inference_mode(False):
            for block in blocks.blocks:
                given.block(block)
            if head is not None:
                given.head(head)
            made = torch.ops.ao_kernels.plan_decoder.default(*given)
            number = int(made[0])
        weakref.finalize(blocks, torch.ops.ao_kernels.forget_plan.default, number)
        found = blocks.bound[_KEY] = _Plan(made, len(blocks.blocks), columns)
    return found


def decoder(
    x: Tensor,
    blocks: CachedBlocks,
    cosine: Tensor,
    sine: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
) -> Decoded:
    """One call into C++ for all blocks and the head."""
    op = torch.ops.ao_kernels.decoder.default
    try:
        return Decoded(*op(x, cosine, sine, start, stop, *_plan(blocks)))
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if ": counts=" in text:  # whose values nobody has checked before
            raise ConfigError(text) from error
        raise


def _refuses(call: DecoderCall) -> str | None:
    if call.x_dtype not in DTYPES:
        return f"needs activations in float32, bfloat16 or float16, found {call.x_dtype}"
    if len(call.x_shape) != 3:
        return f"needs activations (B, T, K), found {call.x_shape}"
    for spec in call.specs:
        if spec.layout not in NAMES:
            return f"needs all weights in tiles, found the layout {spec.layout!r}"
    for caches, shape in zip(call.caches, call.key_shapes, strict=True):
        for name, spec in zip(("keys", "values"), caches, strict=True):
            if reason := refuses_stored(spec, shape):
                return f"of {name}: {reason}"
    return None


def _describe(call: DecoderCall) -> str:
    return f"{isa()}, {len(call.weights)} blocks by one team of threads"


DECODER_KERNELS = tuple(
    Kernel(
        f"{layout}_decoder",
        "decoder",
        layout,
        "cpu",
        decoder,
        50,
        unavailable,
        _refuses,
        _describe,
        alone=want_alone,
    )
    for layout in NAMES
)

"""Steps of decoding by a compiled program, in the place of a model's forward while it generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from operator import is_
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ao_core.ext import ConfigError
from ao_hf.cache.layers import AoStaticLayer
from ao_hf.cache.masks import hides
from ao_hf.generation.programs import program_of
from ao_hf.generation.recording import record

__all__ = ["Steps", "can_step", "stepping"]

#: arguments of a forward that a program knows, or that change nothing
_KNOWN = frozenset({
    "input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "return_dict",
    "logits_to_keep", "cache_position",
})  # fmt: skip


def can_step(model: Any, cache: Any) -> bool:
    """Whether programs can decode with a cache: on the CPU, where all layers see the whole text."""
    return model.device.type == "cpu" and all(type(x) is AoStaticLayer for x in cache.layers)


class Steps:
    """The forward of a model for one token of one text; any other call runs the model's own forward.

    The first token is recorded while it is made, and what was recorded is compiled, or loaded. So a program
    does what the model did, fused or not.

    Args:
        model: of transformers.
        cache: with memory for all tokens, whose layers are all static layers of ao.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self.cache = cache
        #: how many tokens programs made
        self.count = 0
        self._forward = model.forward
        self._program: Any = None
        #: the keys and values that the program was made for
        self._bound: list[Any] = []

    def __call__(self, kwargs: dict[str, Any]) -> Any:
        """What the model returns for these arguments; None where it must run itself."""
        ids, layers = kwargs.get("input_ids"), self.cache.layers
        if ids is None or ids.shape != (1, 1) or kwargs.get("past_key_values") is not self.cache:
            return None
        if any(x for name, x in kwargs.items() if name not in _KNOWN):
            return None
        if hides(kwargs.get("attention_mask")):
            return None
        kv = layers[0].kv
        if kv is None:
            return None
        tokens, coded = kv.counts.tolist()
        due = layers[0].functions.coded_tokens(tokens + 1, kv.window)
        if due > coded or tokens >= layers[0].max_cache_len:
            return None  # a block is quantized, which programs do not
        inputs = {"ids": ids, "position": torch.tensor([[tokens]])}
        if self._program is None or not all(map(is_, self._bound, (x.kv for x in layers))):
            return self._recorded(inputs)
        self.count += 1
        logits = self._program(inputs.values())
        return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)

    def _recorded(self, inputs: dict[str, Tensor]) -> Any:
        def step() -> Any:
            ids, position = inputs.values()
            return self._forward(
                input_ids=ids, position_ids=position, past_key_values=self.cache, use_cache=True
            )

        out, module = record(step, inputs, lambda result: result.logits)
        self._program = program_of(module, inputs)
        self._bound = [x.kv for x in self.cache.layers]
        return out


@contextmanager
def stepping(model: Any, cache: Any) -> Iterator[Steps]:
    """A time in which a model decodes by a program, with this cache.

    Raises:
        ConfigError: programs cannot decode with this cache.
    """
    if not can_step(model, cache):
        raise ConfigError(
            f"cache={cache!r}: programs decode on the CPU, with an AoCache whose layers all see the "
            "whole text, and max_cache_len"
        )
    before = vars(model).get("forward")
    steps = Steps(model, cache)

    @wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        found = None if args else steps(kwargs)
        return steps._forward(*args, **kwargs) if found is None else found

    model.forward, cache.stepped = forward, True
    try:
        yield steps
    finally:
        cache.stepped = False
        if before is None:
            del model.forward
        else:
            model.forward = before

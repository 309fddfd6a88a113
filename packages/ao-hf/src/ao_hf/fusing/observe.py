"""One run of a model on a few tokens, and what every module was given and returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["AttentionSeen", "Observed", "Seen", "evaluating", "observe"]

#: the attention function under which models are observed
_NAME = "ao_observed"
#: tokens of the prompt; one more follows, with the cache
_PROMPT = 3


@dataclass(frozen=True)
class Seen:
    """A call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def x(self) -> Any:
        """The first argument, however it is passed."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)


@dataclass(frozen=True)
class AttentionSeen:
    """A call of an attention function."""

    #: which called it
    module: nn.Module
    query: Tensor
    key: Tensor
    #: named arguments, such as `scaling`
    kwargs: dict[str, Any]


@dataclass
class Observed:
    """All calls of a run, in order."""

    calls: dict[nn.Module, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    attention: list[AttentionSeen] = field(default_factory=list)


_OBSERVED: ContextVar[Observed | None] = ContextVar("ao_hf_observed", default=None)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    observed = _OBSERVED.get()
    if observed is not None:
        observed.attention.append(AttentionSeen(module, query, key, dict(kwargs)))
    kwargs.pop("softcap", None)  # which sdpa refuses; what values there are does not matter here
    mixed, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return mixed, None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in evaluation mode, without gradients."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def observe(model: Any) -> Observed:
    """Run a model of transformers on a short prompt and on one more token.

    Raises:
        Exception: whatever the model raises, if it does not take tokens alone.
    """
    observed, hooks = Observed(), []

    def seen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        observed.calls[module].append(Seen(args, kwargs, output))

    before = model.config._attn_implementation
    token = _OBSERVED.set(observed)
    try:
        model.set_attn_implementation(_NAME)
        hooks = [m.register_forward_hook(seen, with_kwargs=True) for m in model.modules()]
        ids = torch.arange(1, _PROMPT + 2, device=model.device)[None] % model.config.vocab_size
        with evaluating(model):
            first = model(input_ids=ids[:, :_PROMPT], use_cache=True)
            model(input_ids=ids[:, _PROMPT:], use_cache=True, past_key_values=first.past_key_values)
    finally:
        for hook in hooks:
            hook.remove()
        _OBSERVED.reset(token)
        model.set_attn_implementation(before)
    return observed

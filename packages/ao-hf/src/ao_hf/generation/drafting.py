"""Drafted decoding: tokens are proposed by something cheap, and the model checks several in one pass.

A proposed token stands if it is the one that the model chooses there, so the text is that of the model alone,
and with draws that of the same seed. Checks are batch-invariant: each token gets the bits that it gets alone,
wherever the C++ kernels serve. The loop is a `custom_generate` of transformers: what its own loop of
assisted generation does between two passes takes longer than a pass of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ao_core import batch_invariant
from ao_hf.cache.layers import AoLayer

__all__ = ["LOOKUP", "Counts", "ModelDraft", "lookup", "speculating"]

#: what `lookup` is called in the place of a model
LOOKUP = "lookup"

#: tokens of a text, and how many may be proposed -> those that may follow
Propose = Callable[[Sequence[int], int], list[int]]

#: tokens before the next one that are looked up, the longest first
_LONGEST, _SHORTEST = 4, 2
#: how many tokens are proposed: at first, and at most
_FIRST, _MOST = 4, 8


class Counts:
    """What became of the tokens that were proposed."""

    def __init__(self) -> None:
        self.proposed = self.accepted = self.checks = 0


class ModelDraft:
    """Proposes what a model finds likeliest, with a cache of its own.

    Args:
        model: of transformers.
        cache: an empty one for it, that can crop.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self._model, self._cache = model, cache
        #: the tokens whose keys and values are in the cache
        self._read: list[int] = []

    def __call__(self, text: Sequence[int], count: int) -> list[int]:
        """So many tokens that may follow a text, which differs from the last one at its end only."""
        same = min(len(self._read), len(text) - 1)
        while same and self._read[same - 1] != text[same - 1]:
            same -= 1
        self._cache.crop(same - len(self._read))
        self._read = list(text)
        new, found = list(text[same:]), list[int]()
        for _ in range(count):
            token = int(_logits(self._model, new, self._cache, 1)[0, -1].argmax())
            found.append(token)
            new = [token]
        self._read += found[:-1]
        return found


def lookup(text: Sequence[int], count: int) -> list[int]:
    """What followed when the last tokens of a text came last, if they did: at most so many tokens.

    Four tokens are looked for first, then three, then two.
    """
    for length in range(min(_LONGEST, len(text) - 1), _SHORTEST - 1, -1):
        last = list(text[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if text[start] == last[0] and list(text[start : start + length]) == last:
                return list(text[start + length : start + length + count])
    return []


def speculating(propose: Propose, counts: Counts, streamer: Any = None) -> Callable[..., Tensor]:
    """A decoding loop for `model.generate(…, custom_generate=…)`: one text, no padding.

    After a pass that accepts all tokens two more are proposed, after any other one fewer.

    Args:
        propose: called before each pass.
        counts: what became of the tokens is added here.
        streamer: that of `model.generate`, which does not pass it on.
    """

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **kwargs: Any,
    ) -> Tensor:
        cache, end = kwargs["past_key_values"], generation_config.max_length
        cache.activate_past_recording()
        text: list[int] = input_ids[0].tolist()
        new, drafted, most = text, list[int](), _FIRST
        while True:
            # the prompt is read as without a draft
            with nullcontext() if new is text else batch_invariant():
                logits = _logits(model, [*new, *drafted], cache, len(drafted) + 1)
            made: list[int] = []
            stopped = False
            for row in range(len(drafted) + 1):
                scores = logits_processor(input_ids, logits[:, row].float())
                token = _chosen(scores, generation_config.do_sample)
                input_ids = torch.cat([input_ids, token], 1)
                made.append(int(token))
                stopped = bool(stopping_criteria(input_ids, None).all())
                if stopped or made[-1:] != drafted[row : row + 1]:
                    break
            text += made
            counts.checks += 1
            counts.proposed += len(drafted)
            counts.accepted += len(made) - 1
            if streamer is not None:
                streamer.put(input_ids[0, -len(made) :].cpu())
            cache.crop(len(made) - 1 - len(drafted))
            if stopped:
                break
            new = made[-1:]
            if drafted:
                most = min(most + 2, _MOST) if len(made) > len(drafted) else max(most - 1, 1)
            # the pass makes one token more than it checks
            room = min(end - len(text) - 1, _exact_room(cache))
            drafted = propose(text, min(most, room)) if room > 0 else []
        if streamer is not None:
            streamer.end()
        return input_ids

    return decode


def _exact_room(cache: Any) -> int:
    """How many tokens may follow the next one in a pass that reads the same quantized tokens for all of them.

    A block of a quantized cache is due after a certain token; those before it in a pass would read it
    already.
    """
    layer = next((x for x in cache.layers if isinstance(x, AoLayer) and x.kv is not None), None)
    if layer is None or layer.kv is None:
        return _MOST
    coded, tokens, window = layer.functions.coded_tokens, layer.tokens + 1, layer.kv.window
    rooms = range(_MOST, 0, -1)
    return next((n for n in rooms if coded(tokens + n, window) == coded(tokens, window)), 0)


def _logits(model: Any, tokens: list[int], cache: Any, keep: int) -> Tensor:
    """(1, `keep`, vocabulary) after tokens that follow those of a cache."""
    ids = torch.tensor([tokens], device=model.device)
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
    found: Tensor = out.logits[:, -keep:]
    return found


def _chosen(scores: Tensor, draws: bool) -> Tensor:
    """The next token (1, 1)."""
    if not draws:
        return scores.argmax(-1, keepdim=True)
    return torch.multinomial(scores.softmax(-1), 1)

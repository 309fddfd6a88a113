"""Generate text with a loaded model: one answer, its text, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ao_core import is_batch_invariant
from ao_core.ext import ConfigError, checked
from ao_hf.cache.names import EXACT
from ao_hf.generation.caches import (
    cache_name,
    check_kv,
    decoding,
    exact_cache,
    fixed_cache,
    make_cache,
)
from ao_hf.generation.clock import Clock, Timing
from ao_hf.generation.drafting import LOOKUP, Counts, ModelDraft, lookup, speculating
from ao_hf.generation.machine import PeakMemory
from ao_hf.generation.models import Loaded

if TYPE_CHECKING:
    from ao_hf.cache import CachePlan

__all__ = ["Drafted", "Sampling", "Written", "generate", "tokens_of"]

#: the cache of a draft: fused blocks run as one op over it
_DRAFTS_KV = "kv8"

#: `{"role": …, "content": …}` of each turn of a conversation
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; above, tokens are drawn from softmax(logits / temperature).
        top_k: draw from so many of the likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: of the draws; the same seed gives the same text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, value, good, means in (
            (
                "temperature",
                self.temperature,
                self.temperature >= 0,
                "0 (the likeliest token) or more",
            ),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            (
                "top_p",
                self.top_p,
                0 < self.top_p <= 1,
                "a probability above 0, up to 1 (all tokens)",
            ),
        ):
            if not good:
                raise ConfigError(f"{name}={value!r}: use {means}")

    def options(self) -> dict[str, Any]:
        """The arguments of `model.generate` for it."""
        if self.temperature == 0:  # what the folder says of sampling must not come through
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True)
class Drafted:
    """What became of the tokens that a draft proposed.

    Attributes:
        proposed: tokens.
        accepted: of these, in the text.
        checks: forward passes of the target, which checks several tokens at once.
    """

    proposed: int
    accepted: int
    checks: int

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True)
class Written:
    """An answer.

    Attributes:
        text: without special tokens.
        tokens: of the answer alone.
        prompt_tokens: how many the prompt has.
        timing: when the tokens came.
        peak_bytes: the most memory that the process had: on the CPU resident, else allocated by torch there.
        drafted: with a draft.
        cache: what kept keys and values: a recipe, "exact", or that of transformers and why.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    timing: Timing
    peak_bytes: int
    drafted: Drafted | None = None
    cache: str = ""

    def __str__(self) -> str:
        """One line for people."""
        from ao_core.ext.reports import size_text

        timing, plural = self.timing, "" if self.timing.tokens == 1 else "s"
        parts = [
            f"{timing.tokens} token{plural}",
            f"first after {timing.seconds_to_first:.2f} s ({self.prompt_tokens} of the prompt)",
        ]
        if timing.decode_rate:
            parts.append(f"then {timing.decode_rate:.1f} tokens/s")
        if self.drafted is not None:
            parts.append(
                f"{self.drafted.acceptance:.0%} of {self.drafted.proposed} drafted tokens accepted, "
                f"{timing.tokens / max(self.drafted.checks, 1):.1f} tokens per check"
            )
        return "; ".join([*parts, f"peak memory {size_text(self.peak_bytes)}"])


@checked
def tokens_of(
    loaded: Loaded, prompt: str | list[dict[str, str]], chat: bool | None = None, system: str = ""
) -> Tensor:
    """The tokens of a prompt, int64 (1, tokens).

    Args:
        loaded: whose tokenizer is used.
        prompt: a text, or the messages of a conversation, each with "role" and "content".
        chat: whether the text is put into the chat template; None: where the tokenizer has one.
        system: a message that comes before the others.

    Raises:
        ConfigError: there is no tokenizer or template, or the prompt is empty.
    """
    words = loaded.tokenizer
    if words is None:
        raise ConfigError("loaded.tokenizer is None: load the model with tokenizer=True")
    has_template = getattr(words, "chat_template", None) is not None
    if chat is None:
        chat = has_template
    if (chat or system or not isinstance(prompt, str)) and not has_template:
        asked = "chat=True" if chat else "system" if system else "a conversation"
        raise ConfigError(
            f"{asked}: the tokenizer in {loaded.folder} has no chat template; give the text as it is to be "
            "continued, with chat=False (--no-chat)"
        )
    if system and not chat:
        raise ConfigError(
            "system: needs chat=True (--chat): without it the prompt is the whole text"
        )
    if isinstance(prompt, str) and not chat:
        ids = words(prompt, return_tensors="pt")["input_ids"]
    else:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system:
            turns.insert(0, {"role": "system", "content": system})
        filled = words.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = filled["input_ids"]
    if not ids.numel():
        raise ConfigError(f"prompt={prompt!r}: has no tokens")
    found: Tensor = ids.long()
    return found


@checked
def generate(
    loaded: Loaded,
    prompt: str | list[dict[str, str]],
    *,
    on_text: Callable[[str], None] | None = None,
    max_new_tokens: int = 256,
    sampling: Sampling = Sampling(),
    chat: bool | None = None,
    system: str = "",
    kv: str | CachePlan | None = None,
    draft: Loaded | str | None = None,
    compiled: bool = False,
) -> Written:
    """Generate the answer to a prompt, by transformers' own `model.generate`.

    Args:
        loaded: the model.
        prompt: as for `tokens_of`, with `chat` and `system`.
        on_text: called with each piece of the answer as soon as its words are complete.
        max_new_tokens: at most so many tokens.
        sampling: by default the likeliest token.
        chat: see `tokens_of`.
        system: see `tokens_of`.
        kv: name of a recipe for the cache of keys and values, or a plan; None: in the dtype of the model.
        draft: what proposes tokens, which the model checks several at a time; the text is that of the model
            alone. What `draft_of` made, or "lookup": what followed when the last tokens came last.
        compiled: compile the steps of decoding, for a cache of fixed size. On the CPU the program is kept on
            disk, for processes that come after.

    Raises:
        ConfigError: an option cannot work, or the prompt does not fit into the context of the model.
    """
    check_kv(kv)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: use 1 or more")
    if isinstance(draft, str) and draft != LOOKUP:
        raise ConfigError(
            f"draft={draft!r}: use {LOOKUP!r}, or what `draft_of(loaded, {draft!r})` makes"
        )
    ids = tokens_of(loaded, prompt, chat, system).to(loaded.model.device)
    length = ids.shape[1]
    _check_length(loaded.model, length, max_new_tokens)
    if compiled and draft is not None:
        raise ConfigError(
            "compiled=True: a draft checks another number of tokens at each step; use one of them"
        )
    peak, clock = PeakMemory(loaded.model.device), Clock(on_text, loaded.tokenizer)
    model, options = loaded.model, sampling.options()
    cache: Any = None
    exact = (
        kv is None and (draft is not None or is_batch_invariant()) and model.device.type == "cpu"
    )
    if compiled:
        cache, steps = fixed_cache(model, kv, length + max_new_tokens)
        if steps is None:
            options |= _compiling()
    elif exact:  # by kernels that treat every token as if it were alone
        cache, steps = exact_cache(model), None
    else:
        cache, steps = make_cache(model, kv), None
    counts = Counts()
    drafting: AbstractContextManager[None] = nullcontext()
    if isinstance(draft, Loaded):
        drafting = decoding(draft.model, _DRAFTS_KV)
        propose = ModelDraft(draft.model, make_cache(draft.model, _DRAFTS_KV))
        options["custom_generate"] = speculating(propose, counts, clock)
    elif draft is not None:
        options["custom_generate"] = speculating(lookup, counts, clock)
    seeded = _seeded(sampling.seed, model.device)
    reading = decoding(model, EXACT if exact or steps is not None else kv)
    with drafting, seeded, reading, steps or nullcontext():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=clock,
            pad_token_id=_pad(loaded),
            past_key_values=cache,
            **options,
        )
    by_transformers = compiled and steps is None and max_new_tokens > 1
    if by_transformers and getattr(model, "_compiled_call", None) is None:
        raise ConfigError(
            f"compiled=True: transformers compiles no {type(model).__name__} with this cache on "
            f"{model.device.type}; leave it out"
        )
    made = out[0, length:].tolist()
    drafted = None
    if draft is not None:
        drafted = Drafted(counts.proposed, counts.accepted, counts.checks)
    text = loaded.tokenizer.decode(made, skip_special_tokens=True)
    return Written(
        text,
        tuple(made),
        length,
        clock.timing(),
        peak.bytes(),
        drafted,
        cache_name(model, cache, kv),
    )


def _compiling() -> dict[str, Any]:
    """The arguments of `model.generate` that compile the steps of decoding, on CPUs too."""
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=False, mode="default")
    config._compile_all_devices = True
    return {"compile_config": config}


def _check_length(model: Any, prompt: int, new: int) -> None:
    """Raise where a prompt leaves no room in the context that the model was made for."""
    text = model.config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and prompt + new > most:
        raise ConfigError(
            f"max_new_tokens={new}: the prompt has {prompt} tokens, and the model is for {most} in all; "
            f"{'shorten the prompt' if prompt >= most else f'use at most {most - prompt}'}"
        )


def _pad(loaded: Loaded) -> int:
    """The token that fills rows, of which there is none here: any will do, and none makes a warning."""
    eos = loaded.model.generation_config.eos_token_id
    first = eos[0] if isinstance(eos, list) else eos
    return first if isinstance(first, int) else 0


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draws of a seed; those of the program go on afterwards as if nothing had been."""
    if seed is None:
        yield
        return
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield

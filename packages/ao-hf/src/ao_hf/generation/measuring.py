"""How fast models generate, side by side: prefill, decoding, and what share of the memory's rate that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext import ConfigError, checked
from ao_core.ext.quantizing import Progress
from ao_hf.generation.caches import cache_bytes, cache_reads, check_kv, decoding, fill, make_cache
from ao_hf.generation.clock import Clock
from ao_hf.generation.machine import PeakMemory
from ao_hf.generation.models import Loaded
from ao_hf.generation.rounds import Spread, in_rounds

__all__ = [
    "Measured",
    "Runner",
    "Sample",
    "Spread",
    "Workload",
    "measure",
    "runner_of",
    "weights_read",
]


@dataclass(frozen=True)
class Workload:
    """What is generated.

    Attributes:
        prompt: tokens of the prompt, of the longest one where they are ragged.
        new: tokens that are generated, the one that prefill makes included.
        batch: prompts at once.
        ragged: lengths go evenly from a quarter of `prompt` to `prompt`, padded on the left.
        filled: tokens that are in the cache before the prompt, with random keys and values that nothing
            computed, so that decoding in a long context is measured without its prefill.
    """

    prompt: int
    new: int = 64
    batch: int = 1
    ragged: bool = False
    filled: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt, self.batch) < 1 or self.new < 2:
            raise ConfigError(
                f"prompt={self.prompt}, new={self.new}, batch={self.batch}: use 1 or more, and 2 or more new "
                "tokens, since the first is that of the prefill"
            )
        if self.filled < 0:
            raise ConfigError(f"filled={self.filled}: use 0 or more")

    @property
    def tokens(self) -> int:
        """Of a row of the cache in the end."""
        return self.filled + self.prompt + self.new

    def lengths(self) -> list[int]:
        """Tokens of each prompt that are computed, ascending."""
        if not self.ragged or self.batch == 1:
            return [self.prompt] * self.batch
        least = max(self.prompt // 4, 1)
        return [
            least + (self.prompt - least) * row // (self.batch - 1) for row in range(self.batch)
        ]

    def inputs(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Random tokens, the same for each contender, and the mask of padding: (batch, filled + prompt)."""
        generator = torch.Generator().manual_seed(self.prompt)
        total = self.filled + self.prompt
        ids = torch.randint(vocabulary, (self.batch, total), generator=generator)
        starts = self.prompt - torch.tensor(self.lengths())
        return ids, (torch.arange(total) >= starts[:, None]).long()

    def __str__(self) -> str:
        lengths = self.lengths()
        size = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
        before = f"after {self.filled} random keys and values, " if self.filled else ""
        return f"batch of {self.batch}, {before}prompt of {size} tokens, {self.new} new"


@dataclass(frozen=True)
class Sample:
    """One run of a workload.

    Attributes:
        first: seconds to the first token.
        decode: seconds from there to the last.
        weights: bytes of weights that one step of decoding reads.
        cache: bytes of keys and values that the last step reads.
        cache_memory: bytes that the cache takes.
        resident: the most memory that the process had.
        allocated: the most that torch had on the device; None on a CPU, where torch does not count.
    """

    first: float
    decode: float
    weights: int
    cache: int
    cache_memory: int
    resident: int
    allocated: int | None


#: runs a workload once
Runner: TypeAlias = Callable[[Workload], Sample]


@dataclass(frozen=True)
class Measured:
    """One contender on one workload.

    Attributes:
        contender: its name.
        workload: what was generated.
        first_seconds: to the first token.
        prefill_rate: tokens of the prompts per second, padding not counted.
        decode_rate: tokens per second of all rows, the first ones not counted.
        times_baseline: how many times as fast as the baseline it decodes, within a round.
        bytes_per_token: weights and cache that are read for a token of one row, at half of the new tokens.
        share_of_read: bytes that decoding reads per second, over the read rate in the same round.
        weights_bytes: weights that one step reads.
        cache_bytes: memory of the cache at the end.
        peak_resident: bytes, the most of all rounds.
        peak_allocated: the same of torch on the device; None on a CPU.
    """

    contender: str
    workload: Workload
    first_seconds: Spread
    prefill_rate: Spread
    decode_rate: Spread
    times_baseline: Spread
    bytes_per_token: float
    share_of_read: Spread
    weights_bytes: int
    cache_bytes: int
    peak_resident: int
    peak_allocated: int | None


def runner_of(loaded: Loaded, kv: str | None = None) -> Runner:
    """A contender in this process: a model, and the recipe of its cache.

    Raises:
        UnknownNameError: no recipe of caches has that name.
    """
    check_kv(kv)
    kept: dict[tuple[int, ...], Any] = {}  # a cache that was filled, which takes long

    @torch.inference_mode()
    def run(workload: Workload) -> Sample:
        model = loaded.model
        text = model.config.get_text_config(decoder=True)
        ids, mask = (x.to(model.device) for x in workload.inputs(text.vocab_size))
        peak = PeakMemory(model.device)
        with decoding(model, kv):
            cache = _filled(model, kv, workload, kept)
            clock = Clock()
            model.generate(
                ids,
                attention_mask=mask,
                min_new_tokens=workload.new,
                max_new_tokens=workload.new,
                do_sample=False,
                temperature=None,
                top_k=None,
                top_p=None,
                pad_token_id=0,
                past_key_values=cache,
                streamer=clock,
            )
        timing = clock.timing()
        found = Sample(
            timing.seconds_to_first,
            timing.seconds_after,
            weights_read(model, workload.batch),
            cache_reads(cache, workload.batch),
            cache_bytes(cache),
            peak.resident(),
            peak.allocated(),
        )
        if workload.filled and cache.is_croppable:
            cache.crop(workload.filled - int(cache.get_seq_length()))
            kept[_key(workload)] = cache
        return found

    return run


def _key(workload: Workload) -> tuple[int, ...]:
    return workload.batch, workload.filled, workload.tokens


def _filled(
    model: Any, kv: str | None, workload: Workload, kept: dict[tuple[int, ...], Any]
) -> Any:
    """A cache with random keys and values, as it is before the prompt; only the last one is kept."""
    cache = kept.pop(_key(workload), None)
    kept.clear()
    if cache is None:
        cache = make_cache(model, kv)
        fill(cache, model, workload.batch, workload.filled, workload.tokens)
    return cache


@checked
def weights_read(model: nn.Module, rows: int = 1) -> int:
    """Bytes of the weights that one step of decoding reads.

    Of an embedding that is no head only rows are read, which count as nothing. Of experts count as many as
    `rows` tokens reach at most.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    used = {id(p) for m in others for p in m._parameters.values() if p is not None}
    share = _share_of_experts(model, rows)
    total = 0.0
    for parameter in model.parameters():
        if id(parameter) in tables - used:
            continue
        data: Any = parameter
        stored = data.stored_bytes if isinstance(data, QTensor) else data.nbytes
        total += stored * (share if parameter.dim() == 3 else 1.0)
    return int(total)


def _share_of_experts(model: Any, rows: int) -> float:
    text = model.config.get_text_config(decoder=True) if hasattr(model, "config") else None
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return min(rows * chosen / experts, 1.0) if experts and chosen else 1.0


@checked
def measure(
    runners: Mapping[str, Runner],
    workloads: Sequence[Workload],
    *,
    rounds: int = 5,
    device: str = "cpu",
    progress: Progress = None,
) -> list[Measured]:
    """Run every contender on every workload, in rounds in which they take turns.

    A machine changes its speed from one minute to the next; ratios within a round survive that. A first run
    of each is not counted.

    Args:
        runners: name -> contender; the first is the baseline.
        workloads: one after the other.
        rounds: that are counted.
        device: whose memory is read beside, for the read rate.
        progress: as for `quantize_`.

    Raises:
        ConfigError: there is no contender or round.
    """
    found = in_rounds(
        runners,
        workloads,
        lambda w: w if w.filled else replace(w, new=2),
        rounds=rounds,
        device=device,
        progress=progress,
    )
    baseline = next(iter(runners))
    return [
        _measured(name, w, samples, taken[baseline], rates)
        for w, (taken, rates) in found.items()
        for name, samples in taken.items()
    ]


def _measured(
    name: str,
    w: Workload,
    samples: Sequence[Sample],
    baseline: Sequence[Sample],
    rates: Sequence[float],
) -> Measured:
    steps, last = w.new - 1, samples[-1]
    # the cache grew from the prompt to all tokens while these steps read it
    before = w.filled + w.prompt
    step_bytes = last.weights + last.cache * (before + w.new / 2) / (before + w.new)
    pairs = list(zip(samples, baseline, rates, strict=True))
    return Measured(
        name,
        w,
        Spread.of([s.first for s in samples]),
        Spread.of([sum(w.lengths()) / s.first for s in samples]),
        Spread.of([steps * w.batch / s.decode for s in samples]),
        Spread.of([base.decode / s.decode for s, base, _ in pairs]),
        step_bytes / w.batch,
        Spread.of([step_bytes * steps / s.decode / rate for s, _, rate in pairs]),
        last.weights,
        last.cache_memory,
        max(s.resident for s in samples),
        None if last.allocated is None else max(s.allocated or 0 for s in samples),
    )

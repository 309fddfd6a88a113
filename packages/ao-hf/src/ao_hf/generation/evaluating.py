"""How far a model is from its original: perplexity, KL, agreement, through the cache that it decodes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.ext import ConfigError, MissingExtraError, checked
from ao_core.ext.quantizing import Progress, watched
from ao_hf.generation.caches import check_kv, decoding, make_cache
from ao_hf.generation.models import Loaded

__all__ = ["Quality", "Variant", "default_text", "evaluate", "score_tasks", "windows_of"]

#: of each window, so many tokens are the prompt of the greedy continuation
_PROMPT = 64


@dataclass(frozen=True)
class Variant:
    """What is compared with the original.

    Attributes:
        name: in tables; variants of one name are one model, which is loaded once.
        load: gives the model.
        kv: name of a recipe for its cache; None: in the dtype of the model.
    """

    name: str
    load: Callable[[], Loaded]
    kv: str | None = None


@dataclass(frozen=True)
class Quality:
    """A variant beside the original; means over all predicted tokens.

    Attributes:
        name: of the variant.
        kv: recipe of the cache; None: exact.
        chunk: tokens that came at once; 1 is how text is generated.
        tokens: that were predicted.
        perplexity: exp of the mean of −log p(token).
        kl_nats: KL(original ‖ variant); None for a variant without an original.
        kl_error: standard error of that mean, from the tokens.
        agreement: share of the tokens for which both find the same one likeliest.
        diverges_after: greedy continuations agree for so many tokens, the median of all windows.
        greedy_tokens: that were compared; `diverges_after` is at most this.
    """

    name: str
    kv: str | None
    chunk: int
    tokens: int
    perplexity: float
    kl_nats: float
    kl_error: float
    agreement: float
    diverges_after: int
    greedy_tokens: int


def default_text() -> str:
    """English that is on every machine: the documentation that Python brings with it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@checked
def windows_of(tokenizer: Any, text: str, tokens: int = 1024, window: int = 512) -> Tensor:
    """Windows of a text, evenly spread over it, int64 (windows, tokens of a window).

    Args:
        tokenizer: of the model.
        text: any.
        tokens: in all windows together, about.
        window: tokens of one.

    Raises:
        ConfigError: the text or a number is too small.
    """
    if window < 2 or tokens < 2:
        raise ConfigError(f"tokens={tokens}, window={window}: use 2 or more of each")
    window = min(window, tokens)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(ids) < window:
        raise ConfigError(
            f"text: has {len(ids)} tokens, and a window has {window}: use a longer text, or fewer"
        )
    count = max(min(tokens, len(ids)) // window, 1)
    starts = torch.linspace(0, len(ids) - window, count).long().tolist()
    return torch.stack([ids[start : start + window] for start in starts])


@torch.inference_mode()
def evaluate(
    original: Loaded,
    variants: Sequence[Variant],
    windows: Tensor,
    *,
    chunks: Sequence[int] = (1, 64),
    greedy_tokens: int = 32,
    progress: Progress = None,
) -> list[Quality]:
    """Compare variants with the original, for each size of chunks.

    Args:
        original: whose predictions are the measure, each window in one pass.
        variants: one after the other; only one is in memory beside the original.
        windows: int64 (windows, tokens), see `windows_of`.
        chunks: windows pass through the cache in chunks of so many tokens.
        greedy_tokens: continuations of so many tokens are compared, too.
        progress: as for `quantize_`.

    Raises:
        ConfigError: a number cannot work.
        UnknownNameError: no recipe of caches has that name.
    """
    if not chunks or min(chunks) < 1:
        raise ConfigError(f"chunks={tuple(chunks)!r}: use numbers of tokens, 1 or more")
    if greedy_tokens < 1:
        raise ConfigError(f"greedy_tokens={greedy_tokens}: use 1 or more")
    for variant in variants:
        check_kv(variant.kv)
    jobs = _jobs(variants, len(windows))
    names = [f"{v.name}{f' with {v.kv}' if v.kv else ''}, window {row + 1}" for v, row in jobs]
    sums: dict[tuple[str, str | None, int], _Sums] = {}
    name, loaded, paths = "", original, _paths(original, windows, greedy_tokens)
    known_row, expected = -1, torch.empty(0)
    for variant, row in watched(jobs, names, progress, "evaluate"):
        if variant.name != name:
            loaded = original  # the last one goes before the next one comes
            name, loaded = variant.name, variant.load()
            _check_vocabularies(original, loaded, name)
        window, path = windows[row], paths[row]
        if row != known_row:
            known_row, (expected,) = row, _predictions(original, window, None, len(window))
        with decoding(loaded.model, variant.kv):
            for chunk in chunks:
                found = sums.setdefault((name, variant.kv, chunk), _Sums())
                place = 0
                for logs in _predictions(loaded, window, variant.kv, chunk):
                    known = expected[place : place + len(logs)]
                    place += len(logs)
                    found.add(known, logs, window[place - len(logs) + 1 : place + 1])
                found.agreed.append(_agreed(loaded, path, variant.kv, chunk, greedy_tokens))
    return [
        sums[v.name, v.kv, chunk].quality(v, chunk, greedy_tokens)
        for v in variants
        for chunk in chunks
    ]


def _jobs(variants: Sequence[Variant], rows: int) -> list[tuple[Variant, int]]:
    """Variants of one model together, and of these the same window, since what is expected of it is large."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.name, []).append(variant)
    return [(v, row) for group in groups.values() for row in range(rows) for v in group]


class _Sums:
    """Sums over predicted tokens, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.loss = self.kl = self.kl_squared = self.same = 0.0
        self.agreed: list[int] = []

    def add(self, expected: Tensor, found: Tensor, tokens: Tensor) -> None:
        """Take the logarithms of probabilities (tokens, vocabulary), and the tokens that came."""
        expected, found = expected[: len(tokens)], found[: len(tokens)]
        if not len(tokens):
            return
        kl = F.kl_div(found, expected, log_target=True, reduction="none").sum(-1).double()
        self.count += len(tokens)
        self.kl += float(kl.sum())
        self.kl_squared += float(kl.square().sum())
        self.loss += float(
            F.nll_loss(found, tokens.to(found.device), reduction="none").double().sum()
        )
        self.same += int((found.argmax(-1) == expected.argmax(-1)).sum())

    def quality(self, variant: Variant, chunk: int, greedy_tokens: int) -> Quality:
        """The means."""
        n = max(self.count, 1)
        spread = max(self.kl_squared / n - (self.kl / n) ** 2, 0.0)
        return Quality(
            variant.name,
            variant.kv,
            chunk,
            self.count,
            float(torch.tensor(self.loss / n, dtype=torch.float64).exp()),
            self.kl / n,
            (spread / n) ** 0.5,
            self.same / n,
            median_low(self.agreed),
            greedy_tokens,
        )


def _predictions(loaded: Loaded, tokens: Tensor, kv: str | None, chunk: int) -> Iterator[Tensor]:
    """The logarithms of the probabilities of what follows, float32 (chunk, vocabulary), chunk by chunk."""
    cache = make_cache(loaded.model, kv)
    ids = tokens.to(loaded.model.device)
    for part in ids.split(chunk):
        logits = loaded.model(part[None], past_key_values=cache, use_cache=True).logits
        yield F.log_softmax(logits[0].float(), dim=-1)


def _paths(original: Loaded, windows: Tensor, greedy_tokens: int) -> list[Tensor]:
    """The beginning of each window, continued greedily by the original."""
    paths = []
    for window in windows:
        path = window[: min(_PROMPT, len(window))]
        cache, part = make_cache(original.model, None), path
        for _ in range(greedy_tokens):
            ids = part[None].to(original.model.device)
            logits = original.model(
                ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            part = logits[0, -1:].argmax(-1).cpu()
            path = torch.cat([path, part])
        paths.append(path)
    return paths


def _agreed(loaded: Loaded, path: Tensor, kv: str | None, chunk: int, greedy_tokens: int) -> int:
    """For how many tokens the greedy continuation of a variant is that of the original.

    Up to the first other token both have seen the same, so the variant need not continue by itself.
    """
    parts = [logs.argmax(-1) for logs in _predictions(loaded, path, kv, chunk)]
    best = torch.cat(parts).cpu()[-greedy_tokens - 1 : -1]
    return int((best == path[-greedy_tokens:]).long().cumprod(0).sum())


def _check_vocabularies(original: Loaded, other: Loaded, name: str) -> None:
    sizes = [x.model.config.get_text_config(decoder=True).vocab_size for x in (original, other)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{name} has {sizes[1]} tokens and the original {sizes[0]}: it is another model's original"
        )


def score_tasks(
    loaded: Loaded, tasks: Sequence[str], *, limit: int | None = None, folder: str | None = None
) -> dict[str, dict[str, float]]:
    """The metrics of tasks of lm-eval, by task; with an exact cache, since lm-eval calls the model itself.

    Args:
        loaded: the model.
        tasks: names of lm-eval; many download their data.
        limit: so many questions of each task; None: all.
        folder: where lm-eval looks for descriptions of further tasks.

    Raises:
        MissingExtraError: lm-eval is not installed.
        ConfigError: lm-eval has no such task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "lm_eval", "lm-eval", "tasks") from error
    manager = TaskManager(include_path=folder)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ConfigError(
            f"tasks={', '.join(unknown)!r}: lm-eval has none of that name; `lm-eval ls tasks` lists them"
        )
    done = simple_evaluate(
        model=HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=0,
    )
    found: dict[str, dict[str, float]] = {}
    for task, metrics in done["results"].items():
        found[task] = {
            k.removesuffix(",none"): v for k, v in metrics.items() if isinstance(v, float)
        }
    return found

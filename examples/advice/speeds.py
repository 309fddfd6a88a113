"""Measure what `autoquant` chooses for five models in three uses, next to the best single recipe."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from advice import figures
from advice.loss import answers, call, loss, quantized
from advice.subjects import SUBJECTS, Sample, Subject
from tqdm import tqdm

from ao_quant import autoquant
from ao_quant.autotuning import MIXED
from benchmarking import interleaved, paired

DENSE, CHOSEN, BEST = "dense", "autoquant", "best recipe"


def main() -> None:
    args = parse_args()
    found = figures.read(args.json, "rows", [])
    done = {(row["model"], row["use"]) for row in found["rows"]}
    for name in tqdm(SUBJECTS):
        subject = SUBJECTS[name]()
        right = answers(subject.model, subject.held_out)
        for use, sample in subject.uses.items():
            if (name, use) not in done:
                row = measured(subject, sample, args.rounds, right)
                found["rows"].append({"model": name, "use": use, **row})
                figures.write(args.json, found)


def measured(subject: Subject, sample: Sample, rounds: int, right: list[Any]) -> dict[str, Any]:
    """What `autoquant` chose, timed again next to dense and to the best recipe within the limit."""
    start = time.perf_counter()
    chosen = autoquant(subject.model, sample, data=subject.data, apply=False, cache=False)
    seconds = time.perf_counter() - start
    taken = chosen.wholes[chosen.picked]
    fits = [
        each
        for each in chosen.wholes
        if each.config is not None and each.name != MIXED and each.loss <= chosen.max_loss
    ]
    best = min(fits, key=lambda each: each.seconds, default=None)
    models = {DENSE: subject.model, CHOSEN: subject.model}
    configs = {CHOSEN: taken.config, BEST: best and best.config}
    models |= {name: quantized(subject, config) for name, config in configs.items() if config}
    calls = {name: partial(call, model, sample) for name, model in models.items()}
    one = max(min(each.seconds for each in chosen.wholes), 1e-4)
    times = interleaved(calls, rounds=rounds, repeats=max(1, min(50, int(0.1 / one))))
    row: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "chosen": taken.name,
        "best": best.name if best else None,
        "loss": taken.loss,
        "limit": chosen.max_loss,
        "held_out": loss(subject, right, models[CHOSEN]).loss,
        "exchanges": sum(not each.reason for each in chosen.exchanges),
        "tried": len(chosen.exchanges),
        "lines": len(str(chosen).splitlines()),
    }
    for key, name, baseline in (("dense", CHOSEN, DENSE), ("recipe", CHOSEN, BEST)):
        if {name, baseline} <= times.keys():
            row[key] = paired(times, name, baseline)
    return row


def parse_args() -> argparse.Namespace:
    parser = figures.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of times (30)")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

"""Measure what `autoquant` chooses for five models in three uses, beside the best recipe for all weights."""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from advice.loss import answers, loss
from advice.subjects import SUBJECTS, Sample, Subject
from torch import nn
from tqdm import tqdm

from ao_core import Config, quantize_
from ao_quant import autoquant
from ao_quant.autotuning import MIXED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from benchmarking import environment, interleaved, paired

DENSE, CHOSEN, BEST = "dense", "autoquant", "best recipe"


def main() -> None:
    args = parse_args()
    found: dict[str, Any] = {
        "about": environment() | {"threads": torch.get_num_threads()},
        "rows": [],
    }
    if args.json.exists():
        found["rows"] = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    done = {(row["model"], row["use"]) for row in found["rows"]}
    for name in tqdm(SUBJECTS):
        subject = SUBJECTS[name]()
        right = answers(subject.model, subject.held_out)
        for use, sample in subject.uses.items():
            if (name, use) not in done:
                row = measured(subject, sample, args.rounds, right)
                found["rows"].append({"model": name, "use": use, **row})
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(found["rows"][-1])


def measured(subject: Subject, sample: Sample, rounds: int, right: list[Any]) -> dict[str, Any]:
    """What `autoquant` chose, timed once more beside dense and the best recipe within the limit."""
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
    configs = {CHOSEN: taken.config, BEST: best and best.config}
    models = {DENSE: subject.model}
    models |= {
        name: _quantized(subject.model, config) for name, config in configs.items() if config
    }
    calls = {name: _call(model, sample) for name, model in models.items()}
    one = max(min(each.seconds for each in chosen.wholes), 1e-4)
    times = interleaved(calls, rounds=rounds, repeats=max(1, min(20, int(0.05 / one))))
    row: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "chosen": taken.name,
        "best": best.name if best else None,
        "loss": taken.loss,
        "limit": chosen.max_loss,
        "held_out": loss(subject, right, models.get(CHOSEN, subject.model)).loss,
        "exchanges": sum(not each.reason for each in chosen.exchanges),
        "tried": len(chosen.exchanges),
        "lines": len(str(chosen).splitlines()),
    }
    for key, name, baseline in (("dense", CHOSEN, DENSE), ("recipe", CHOSEN, BEST)):
        if {name, baseline} <= times.keys():
            row[key] = paired(times, name, baseline)
    return row


@torch.no_grad()
def _quantized(model: nn.Module, config: Config) -> nn.Module:
    made = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    quantize_(made, config)
    return made


def _call(model: nn.Module, sample: Sample) -> Callable[[], Any]:
    return lambda: model(**sample) if isinstance(sample, dict) else model(sample)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    parser.add_argument("--rounds", type=int, default=15, help="of times (15)")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

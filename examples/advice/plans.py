"""Measure plans of five models at eight budgets each, next to one recipe for all weights."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from advice import figures
from advice.loss import answers, loss, nbytes, quantized
from advice.subjects import SUBJECTS, Subject
from tqdm import tqdm

from ao_core import FqnToConfig, config_to_dict
from ao_quant import plan
from ao_quant.planning import CANDIDATES

#: mean bits per planned weight that budgets of bytes are made of
BITS = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.5, 7.5)


def main() -> None:
    args = parse_args()
    found = figures.read(args.json, "models", {})
    for name in tqdm(SUBJECTS):
        model = found["models"].setdefault(name, {})
        if "plans" in model and ("time" in model or not args.times):
            continue
        subject = SUBJECTS[name]()
        if "plans" not in model:
            model |= measured(subject, name)
        if args.times:
            model["time"] = timed(subject, model["plans"][len(BITS) // 2]["budget"])
        figures.write(args.json, found)


def measured(subject: Subject, name: str) -> dict[str, Any]:
    """Uniform recipes and plans of a model, each with its bytes and its loss."""
    right = answers(subject.model, subject.held_out)
    sizes = plan(subject.model, bits=16.0, measure="weight")
    weights = sum(torch.Size(choice.shape).numel() for choice in sizes.choices)
    names = [choice.fqn for choice in sizes.choices]
    rows: dict[str, Any] = {"measure": subject.measure, "uniform": [], "plans": []}
    for recipe in CANDIDATES:
        # as `quantize_` applies it, and with every weight named, so that output heads have it too
        named = FqnToConfig({**dict.fromkeys(names, recipe), "*": None})
        for text, config in ((recipe, recipe), (f"{recipe}, heads too", named)):
            made = quantized(subject, config)
            if text == recipe or nbytes(made) != rows["uniform"][-1]["bytes"]:
                figures = loss(subject, right, made)._asdict()
                rows["uniform"].append({"recipe": text, "bytes": nbytes(made), **figures})
    kept = {row.fqn: row.bytes for row in sizes.kept}
    base = sum(kept.values())
    for bits in tqdm(BITS, desc=name, leave=False):
        budget = int(base + bits * weights / 8)
        chosen = plan(subject.model, budget=budget, data=subject.data, measure=subject.measure)
        made = quantized(subject, chosen)
        rows["plans"].append(
            {
                "bits": bits,
                "budget": budget,
                "bytes": nbytes(made),
                "rank_correlation": chosen.rank_correlation,
                "predicted": chosen.error,
                "measured": chosen.measured,
                "formats": len(
                    {json.dumps(config_to_dict(c)) for c in dict(chosen.entries).values() if c}
                ),
                **loss(subject, right, made)._asdict(),
            }
        )
    return rows


def timed(subject: Subject, budget: int) -> dict[str, Any]:
    """The seconds that a plan takes; nothing else should run."""
    start = time.perf_counter()
    plan(subject.model, budget=budget, data=subject.data, measure=subject.measure)
    seconds = round(time.perf_counter() - start, 1)
    return {"seconds": seconds, "threads": torch.get_num_threads()}


def parse_args() -> argparse.Namespace:
    parser = figures.parser(__doc__)
    parser.add_argument("--times", action="store_true", help="also time a plan of each model")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

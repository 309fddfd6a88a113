"""Write how far recipes train the byte model, examples/bytelm/curves.json, into docs/training-curves.md.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from statistics import mean
from typing import Any

from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "training-curves.md"
RESULTS = ROOT / "examples" / "bytelm" / "curves.json"
#: what the others are compared with
BASELINE = "bf16"


def sections(data: dict[str, Any]) -> dict[str, str]:
    """Name of a section of the page -> its Markdown."""
    return {"measured": about(data), "recipes": recipes(data["runs"])}


def about(data: dict[str, Any]) -> str:
    """What was trained, where."""
    found, settings = data["about"], data["settings"]
    model, corpus = settings["model"], found["corpus"]
    return (
        f"{found['date']}; {found['cpu']}; Python {found['python']}, torch {found['torch']}, ao-core "
        f"{found['ao-core']}. {model['num_hidden_layers']} layers of width {model['hidden_size']}; "
        f"{settings['steps']} steps of {settings['batch']} windows of {settings['context']} bytes; "
        f"{settings['optimizer']} with a learning rate of {settings['matrix_lr']:g}, {settings['warmup']} "
        f"steps up and {settings['cooldown']} down. Measured on {settings['measure_windows']} windows of "
        f"the {corpus['held_out_files']} files of the standard library of Python {corpus['python']} that "
        "were held out."
    )


def recipes(runs: list[dict[str, Any]]) -> str:
    """A row for each recipe: every seed, their mean, and how far that is from bfloat16's."""
    ends: dict[str, dict[int, float]] = {}
    for run in runs:
        ends.setdefault(run["recipe"], {})[run["seed"]] = run["bits_per_byte"]
    seeds = sorted({run["seed"] for run in runs})
    header = ["recipe", *(f"seed {seed}" for seed in seeds), "mean", f"to {BASELINE}"]
    lines = [
        [
            f"`{recipe}`" if recipe != BASELINE else BASELINE,
            *(f"{found[seed]:.4f}" if seed in found else "–" for seed in seeds),
            f"{mean(found.values()):.4f}",
            change(found, ends.get(BASELINE, {})),
        ]
        for recipe, found in ends.items()
    ]
    return table(header, lines)


def change(found: dict[int, float], baseline: dict[int, float]) -> str:
    """How much larger the mean is than that of the baseline over the same seeds, in percent."""
    shared = sorted(found.keys() & baseline.keys())
    if not shared or found is baseline:
        return "–"
    ratio = mean(found[seed] for seed in shared) / mean(baseline[seed] for seed in shared)
    return f"{100 * (ratio - 1):+.2f} %"


if __name__ == "__main__":
    fresh = sections(json.loads(RESULTS.read_text(encoding="utf-8")))
    pages = {(PAGE, name): text for name, text in fresh.items()}
    sys.exit(main(pages, "generate_training_curves.py"))

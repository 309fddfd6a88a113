"""Write what plans, `autoquant` and recipes come to on five models into their pages.

Reads examples/advice/{plans,speeds,recipes}.json. With --check nothing is written, and the exit status says
whether the pages are fresh.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from doc_sections import main, table
from workspace import ROOT

FOLDER = ROOT / "examples" / "advice"
DOCS = ROOT / "docs"
#: what a loss is, by measure
LOSSES = {"kl": "KL, nats", "output": "noise / signal"}

Data = dict[str, Any]


def read(name: str) -> Data:
    """The figures of a script of the example."""
    found: Data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def about(data: Data) -> str:
    """When and where figures were measured."""
    found = data["about"]
    versions = found.get("versions", found)
    threads = f"{found['threads']} thread(s)"
    return f"{found['date']}; {found['cpu']}, {threads}; torch {versions['torch']}."


def best(rows: list[Data], budget: int) -> Data | None:
    """The recipe for all weights that fits and loses least."""
    fits = [row for row in rows if row["bytes"] <= budget]
    return min(fits, key=lambda row: row["loss"], default=None)


def ratios(model: Data) -> Iterator[tuple[Data, Data | None, float | None]]:
    """Each plan, the best recipe within its budget, and the loss of the one over that of the other."""
    for row in model["plans"]:
        other = best(model["uniform"], row["budget"])
        yield row, other, None if other is None else row["loss"] / other["loss"]


def plans_summary(data: Data) -> str:
    """A row for each model."""
    lines = []
    for name, model in data["models"].items():
        found = [ratio for _, _, ratio in ratios(model) if ratio is not None]
        ranks = [row["rank_correlation"] for row in model["plans"] if row["rank_correlation"]]
        lines.append(
            [
                name,
                f"{len(found)}",
                f"{median(found):.2f}",
                f"{max(found):.2f}",
                f"{median(ranks):.2f}" if ranks else "–",
                f"{model['time']['seconds']:.0f} s",
            ]
        )
    header = ["model", "budgets", "loss, median", "at most", "rank correlation", "time"]
    return f"{table(header, lines)}\n\n{about(data)}"


def plans(data: Data) -> str:
    """All budgets."""
    lines = [
        [
            name,
            LOSSES[model["measure"]],
            f"{row['budget'] / 1e6:.2f}",
            f"{row['loss']:.3g}",
            f"{other['loss']:.3g}" if other else "–",
            f"`{other['recipe']}`" if other else "none fits",
            f"{ratio:.2f}" if ratio is not None else "–",
        ]
        for name, model in data["models"].items()
        for row, other, ratio in ratios(model)
    ]
    header = ["model", "loss", "budget, MB", "plan", "best recipe", "which", "ratio"]
    return table(header, lines)


def speeds(data: Data) -> str:
    """All models and uses."""
    lines = []
    for row in data["rows"]:
        dense = _times(row["dense"])
        recipe = "the same" if row["chosen"] == row["best"] else _times(row.get("recipe"))
        exchanged = f"{row['exchanges']} of {row['tried']}"
        lines.append(
            [
                row["model"],
                row["use"],
                f"`{row['chosen']}`" if row["chosen"] not in ("dense", "mixed") else row["chosen"],
                f"`{row['best']}`" if row["best"] else "–",
                exchanged,
                dense,
                recipe,
                f"{row['held_out']:.2g}",
                f"{row['seconds']:.0f} s",
            ]
        )
    header = [
        "model", "use", "chosen", "best recipe", "exchanged", "× dense", "× best recipe", "loss", "time",
    ]  # fmt: skip
    return f"{table(header, lines)}\n\n{about(data)}"


def _times(found: list[float] | None) -> str:
    if found is None:
        return "–"
    middle, low, high = found
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def recipes(data: Data) -> str:
    """A row for each recipe: what remains of the size, and the losses, by the loss of the first model."""
    models = data["models"]
    names = list(models)
    first = models[names[0]]["rows"]
    order = sorted(
        (name for name in first if "loss" in first[name]), key=lambda name: first[name]["loss"]
    )
    lines = []
    for name in order:
        size = first[name]["bytes"] / models[names[0]]["bytes"]
        losses = [
            f"{row['loss']:.2g}" if "loss" in (row := models[each]["rows"][name]) else "–"
            for each in names
        ]
        lines.append([f"`{name}`", f"{100 * size:.0f} %", *losses])
    header = [
        "recipe",
        f"size of {names[0]}",
        *(f"{name}, {LOSSES[models[name]['measure']]}" for name in names),
    ]
    return f"{table(header, lines)}\n\n{about(data)}"


def sections() -> dict[tuple[Path, str], str]:
    """(page, section) -> text."""
    planned, timed, compared = read("plans"), read("speeds"), read("recipes")
    return {
        (DOCS / "plan.md", "plans"): plans_summary(planned),
        (DOCS / "quality.md", "plans"): plans(planned),
        (DOCS / "autoquant.md", "autoquant"): speeds(timed),
        (DOCS / "recipes.md", "five models"): recipes(compared),
    }


if __name__ == "__main__":
    sys.exit(main(sections(), Path(__file__).name))

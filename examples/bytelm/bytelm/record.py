"""What is kept of a finished run: the checkpoint, its figures, and the curve as data and picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from bytelm import data
from bytelm.data import Corpus
from bytelm.evaluate import bits_per_byte
from bytelm.model import ByteLM, load, save

#: file names beside those of the checkpoint
FIGURES, CURVE_DATA, CURVE_PICTURE = "figures.json", "curve.csv", "curve.png"
#: windows that give the figure of the checkpoint
WINDOWS = 1024


def record(
    model: ByteLM, corpus: Corpus, curve: list[dict[str, Any]], config: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Write everything into a folder; the figures are those of the weights as they were saved.

    Args:
        model: as trained.
        corpus: what it was trained on.
        curve: as `train` returned it.
        config: the settings of the run; windows to measure on are as long as its `context`.
        folder: is made where there is none.
    """
    save(model, folder)
    context = config["context"]
    windows = data.spread(corpus.held_out, context, WINDOWS)
    figures = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bits_per_byte": round(bits_per_byte(load(folder), windows), 4),
        "measured": {"context": context, "windows": WINDOWS, "bytes": WINDOWS * context // 2},
        "corpus": corpus.about,
        "training": config | {"bytes": curve[-1]["bytes"], "seconds": curve[-1]["seconds"]},
    }
    (folder / FIGURES).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    with (folder / CURVE_DATA).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(curve[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(curve)
    plot(curve, folder / CURVE_PICTURE)
    return figures


def plot(curve: list[dict[str, Any]], path: Path) -> None:
    """Bits per byte of training and held-out text over the bytes seen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    seen = [point["bytes"] / 1e6 for point in curve]
    for key, label in (("train_bits_per_byte", "training"), ("bits_per_byte", "held out")):
        axes.plot(seen, [point[key] for point in curve], marker=".", label=label)
    axes.set_ylim(1.0, 3.0)
    axes.set_xlabel("bytes seen, millions")
    axes.set_ylabel("bits per byte")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)

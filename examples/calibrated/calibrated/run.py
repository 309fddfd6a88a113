"""Measure cells that have no figure yet; each is written as soon as it is there."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from ao_core import QTensor, quantize_
from calibrated.cells import FORMATS, METHODS, NEAREST, Cell

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "minilm"))
from minilm_demo.results import environment

__all__ = ["Subject", "bits_per_weight", "made_by_ao", "measure"]

#: (a copy of the original, cell) -> the quantized model, the seconds it took, and further figures by name
Make = Callable[[nn.Module, Cell], tuple[Any, ...]]


@dataclass(frozen=True)
class Subject:
    """A model, and what it is calibrated and judged on."""

    #: seed -> the model; all compute the same function, or each has its own quality
    original: Callable[[int], nn.Module]
    #: seed -> data for `quantize_`
    data: Callable[[int], Sequence[Any]]
    #: (seed, a quantized model) -> figures by name
    quality: Callable[[int, nn.Module], Mapping[str, float]]


def made_by_ao(subject: Subject, original: nn.Module, cell: Cell) -> tuple[nn.Module, float]:
    """`Make` of a cell whose format and method are in the tables."""
    configs = METHODS[cell.method](FORMATS[cell.format])
    data = None if cell.method == NEAREST else subject.data(cell.seed)
    start = time.process_time()
    quantize_(original, configs, data=data)
    return original, time.process_time() - start


def measure(
    path: Path, about: Mapping[str, Any], cells: Sequence[Cell], subject: Subject, make: Make
) -> list[dict[str, Any]]:
    """Add the cells that are missing to a JSON file; all of its rows.

    Args:
        path: of the file. The rows that are there stay.
        about: what was measured on; a file of something else is refused.
        cells: in the order in which they are measured.
        subject: the model.
        make: quantizes.
    """
    found: dict[str, Any] = {"about": {**environment(), **about}, "rows": []}
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if wrong := [name for name, value in about.items() if old["about"].get(name) != value]:
            raise SystemExit(f"error: {path}: was measured with other {', '.join(wrong)}")
        found["rows"] = old["rows"]
    done = {Cell(row["format"], row["method"], row["seed"]) for row in found["rows"]}
    seed, original = -1, nn.Module()
    for cell in tqdm([cell for cell in cells if cell not in done]):
        if cell.seed != seed:
            seed, original = cell.seed, subject.original(cell.seed)
        # not one that shares parameters, which rotations change
        made, seconds, *figures = make(copy.deepcopy(original), cell)
        row = {**cell._asdict(), "cpu_seconds": round(seconds, 1)}
        if bits := bits_per_weight(made):
            row["bits_per_weight"] = round(bits, 4)
        quality = subject.quality(cell.seed, made)
        row |= {name: float(f"{value:.6g}") for name, value in quality.items()}
        for more in figures:
            row |= more
        found["rows"].append(row)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def bits_per_weight(model: nn.Module) -> float:
    """Bits of the quantized weights of the blocks, scales and all, over their number; 0 without any.

    Heads and embeddings, which most recipes keep in 8 bits, are larger than any of them and left out.
    """
    weights = [
        p
        for name, p in model.named_parameters()
        if isinstance(p, QTensor) and "head" not in name and "embed" not in name
    ]
    stored = sum(p.stored_bytes for p in weights)
    return 8 * stored / sum(p.numel() for p in weights) if weights else 0.0

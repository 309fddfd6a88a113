"""Prune MiniLM by several methods, and see what is left of its answers: 2:4, and half of the weights.

Texts that methods calibrate on and texts that are measured are distinct. Results are added to those of a JSON
file that there are already, so the script may be stopped and started again; docs/pruning.md shows them.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from minilm_demo import minilm
from minilm_demo.corpus import separate_pairs
from minilm_demo.metrics import quality
from minilm_demo.results import environment
from torch import nn

from ao_sparsity import (
    NofM,
    Pruning,
    Unstructured,
    __version__,
    apply_masks,
    prune_magnitude,
    prune_sparsegpt,
    prune_wanda,
    sensitivity,
)

#: texts that methods may look at, texts that are measured, and tokens after which all are cut
CALIBRATION, PAIRS, QUERY_TOKENS, DOCUMENT_TOKENS, CALIBRATION_TOKENS = 100, 300, 20, 24, 96

Data = list[dict[str, torch.Tensor]]
Method = Callable[[nn.Module, Data], Pruning]

HALF = Unstructured(0.5)


def allocated(model: nn.Module, data: Data) -> Pruning:
    """Half of all weights by magnitude, the share of each layer by what it costs on one batch."""
    measured = sensitivity(model, data[:1], HALF, levels=(0.3, 0.5, 0.7))
    return prune_magnitude(model, measured.allocate(0.5))


#: pattern and budget -> name of the method -> what finds the masks
VARIANTS: dict[str, dict[str, Method]] = {
    "2:4": {
        "magnitude": lambda model, _: prune_magnitude(model, NofM(2, 4)),
        "Wanda": lambda model, data: prune_wanda(model, data, NofM(2, 4)),
        "SparseGPT": lambda model, data: prune_sparsegpt(model, data, NofM(2, 4)),
    },
    "50%, each layer": {
        "magnitude": lambda model, _: prune_magnitude(model, HALF),
        "Wanda": lambda model, data: prune_wanda(model, data, HALF),
        "SparseGPT": lambda model, data: prune_sparsegpt(model, data, HALF),
    },
    "50% of all": {
        "magnitude, one threshold": lambda model, _: prune_magnitude(model, HALF, scope="model"),
        "magnitude, by sensitivity": allocated,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(__file__).with_name("pruning.json")
    parser.add_argument("--json", type=Path, default=default, help=f"results ({default.name})")
    args = parser.parse_args()

    model = minilm.load()
    seen, measured = separate_pairs(PAIRS)
    seen = seen[: 3 * CALIBRATION : 3]
    batches = minilm.tokenize([pair.document for pair in seen], CALIBRATION_TOKENS)
    data = minilm.inputs(batches)
    texts = [
        minilm.tokenize([pair.query for pair in measured], QUERY_TOKENS),
        minilm.tokenize([pair.document for pair in measured], DOCUMENT_TOKENS),
    ]
    original = [minilm.encode(model, each) for each in texts]

    found: dict[str, Any] = {"rows": []}
    if args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    found["about"] = environment() | {
        "ao-sparsity": __version__,
        "pairs": len(measured),
        "calibration_texts": len(seen),
        "calibration_tokens": sum(int(batch.mask.sum()) for batch in batches),
    }
    if not found["rows"]:
        found["rows"].append(row("dense", "–", quality(*original, *original)))
    done = {(each["budget"], each["method"]) for each in found["rows"]}
    for budget, methods in VARIANTS.items():
        for name, method in methods.items():
            if (budget, name) not in done:
                pruning = method(model, data)
                pruned = copy.deepcopy(model)
                apply_masks(pruned, pruning)
                vectors = [minilm.encode(pruned, each) for each in texts]
                found["rows"].append(row(name, budget, quality(*vectors, *original), pruning))
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(found["rows"][-1])


def row(method: str, budget: str, measured: Any, pruning: Pruning | None = None) -> dict[str, Any]:
    """What was measured of one variant."""
    report = None if pruning is None else pruning.report
    return {
        "method": method,
        "budget": budget,
        "weights": 0 if report is None else report.weights,
        "removed": 0 if report is None else report.removed,
        **{k: None if v == float("inf") else v for k, v in asdict(measured).items()},
    }


if __name__ == "__main__":
    main()

"""A training step of the byte model that QATConfig prepared, compared with that of the dense model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.append(str(Path(__file__).parents[3] / "examples" / "bytelm"))
from bytelm import model

from ao_core import quantize_
from ao_quant import (
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationTernaryWeightConfig,
    QATConfig,
    UIntxWeightOnlyConfig,
)
from benchmarking import arguments, interleaved, paired, record

DENSE = "dense"
CASES = {
    "int3 g64": QATConfig(UIntxWeightOnlyConfig(3, 64)),
    "int3 g64, learned scales and offsets": QATConfig(
        UIntxWeightOnlyConfig(3, 64), scales="learned"
    ),
    "8da4w g32": QATConfig(Int8DynamicActivationInt4WeightConfig(32)),
    "8da4w g32, learned scales": QATConfig(
        Int8DynamicActivationInt4WeightConfig(32), scales="learned"
    ),
    "BitNet": QATConfig(Int8DynamicActivationTernaryWeightConfig()),
}
TEXT = """\
A training step of the byte model (forward pass, backward pass, `torch.optim.AdamW`) on {batch} × {context}
bytes in float32, {threads} thread(s), in alternate rounds of one process. *× dense*: how many times as long
as the step of the dense model it takes, the median of the ratios within {rounds} rounds, with its
interval."""


def step_of(prepared: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """A call that trains the model by one step."""
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-5)

    def step() -> None:
        logits = prepared(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    args = arguments(__doc__, batch=4, context=256, threads=1, rounds=15)
    torch.set_num_threads(args.threads)
    dense = model.load().requires_grad_(True)
    ids = torch.randint(256, (args.batch, args.context + 1))
    steps = {DENSE: step_of(copy.deepcopy(dense), ids)}
    for name, config in CASES.items():
        quantize_(prepared := copy.deepcopy(dense), config)
        steps[name] = step_of(prepared, ids)
    samples = interleaved(steps, rounds=args.rounds)
    rows = []
    for name in steps:
        times = paired(samples, DENSE, name)  # as long
        rows.append(
            {
                "model": name,
                "step, ms": 1000 * median(samples[name]),
                "× dense": times.median,
                "95 %": times.interval(),
            }
        )
    record(args.json, "A step of quantization-aware training", TEXT.format(**vars(args)), rows)


if __name__ == "__main__":
    main()

"""Seconds of a step of every rule on the CPU: by kernels, by torch operations, and of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.append(str(Path(__file__).parents[2] / "ao-kernels" / "benchmarks" / "gpu"))  # stepping
from stepping import mixed_shapes, parameters

import ao_optim
from ao_core import kernels
from benchmarking import arguments, interleaved, paired, record

Params = list[nn.Parameter]
#: so small that parameters stay what they are
LR = 1e-6
#: name -> the optimizer, and the same of torch; None: its fused AdamW, which is the nearest
MAKERS: dict[str, tuple[Callable[[Params], Optimizer], Callable[[Params], Optimizer] | None]] = {
    "AdamW8bit": (lambda p: ao_optim.AdamW8bit(p, lr=LR), None),
    "AdamW4bit": (lambda p: ao_optim.AdamW4bit(p, lr=LR), None),
    "SGD8bit": (
        lambda p: ao_optim.SGD8bit(p, lr=LR),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, fused=True),
    ),
    "RMSprop8bit": (
        lambda p: ao_optim.RMSprop8bit(p, lr=LR),
        lambda p: torch.optim.RMSprop(p, lr=LR, foreach=True),
    ),
    "Adagrad8bit": (
        lambda p: ao_optim.Adagrad8bit(p, lr=LR),
        lambda p: torch.optim.Adagrad(p, lr=LR, fused=True),
    ),
    "AdEMAMix8bit": (lambda p: ao_optim.AdEMAMix8bit(p, lr=LR), None),
    "AdEMAMix8bit, dynamic8": (
        lambda p: ao_optim.AdEMAMix8bit(p, lr=LR, state_format="dynamic8"),
        None,
    ),
    "LAMB8bit": (lambda p: ao_optim.LAMB8bit(p, lr=LR), None),
}
FUSED = "torch AdamW, fused"


def main() -> None:
    args = arguments(__doc__, elements=20_000_000, tensors=60, threads=1, rounds=7, only="")
    torch.set_num_threads(args.threads)
    params = parameters(mixed_shapes(args.elements, args.tensors), torch.float32, "cpu")
    elements = sum(p.numel() for p in params)
    rows = []
    for name, (make, make_torch) in MAKERS.items():
        if args.only and args.only not in name:
            continue
        optimizer = make(params)
        baseline = make_torch or (lambda p: torch.optim.AdamW(p, lr=LR, fused=True))
        steps = {"own": optimizer.step, "reference": _by_reference(optimizer)}
        steps["torch"] = baseline(params).step
        samples = interleaved(steps, rounds=args.rounds)
        rows.append(_row(name, samples, FUSED if make_torch is None else "its own rule"))
    record(
        args.json,
        "A step of every rule on the CPU",
        f"{elements / 1e6:.1f} million float32 parameters in {len(params)} tensors, "
        f"{args.threads} thread(s), in alternate rounds of one process; medians of ratios within rounds. "
        "*× torch*: how many times as long as torch's fused or foreach step of the same rule, or of AdamW "
        "where it has none.",
        rows,
    )


def _by_reference(optimizer: Optimizer) -> Callable[[], None]:
    def step() -> None:
        with kernels("reference"):
            optimizer.step()

    return step


def _row(name: str, samples: dict[str, list[float]], baseline: str) -> dict[str, Any]:
    over = paired(samples, "torch", "own")
    return {
        "optimizer": name,
        "step, ms": 1000 * median(samples["own"]),
        "× torch": over.median,
        "95 %": over.interval(),
        "baseline": baseline,
        "torch operations, ms": 1000 * median(samples["reference"]),
        "× less than these": paired(samples, "own", "reference").median,
    }


if __name__ == "__main__":
    main()

"""Seconds of a step of AdamW on the CPU: formats of state beside torch, torchao and bitsandbytes."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.append(str(Path(__file__).parents[2] / "ao-kernels" / "benchmarks" / "gpu"))  # stepping
from stepping import contenders, mixed_shapes, parameters, state_bytes

from benchmarking import arguments, interleaved, paired, record

BASELINE = "torch AdamW, fused"


def main() -> None:
    args = arguments(__doc__, elements=100_000_000, tensors=300, threads=2, rounds=7)
    torch.set_num_threads(args.threads)
    params = parameters(mixed_shapes(args.elements, args.tensors), torch.float32, "cpu")
    elements = sum(p.numel() for p in params)
    found = contenders(params, lambda: None)
    steps = {name: each.optimizer.step for name, each in found.items()}
    samples = interleaved(steps, rounds=args.rounds)
    rows = []
    for name, each in found.items():
        seconds = median(samples[name])
        times = paired(samples, BASELINE, name)  # as long
        rows.append(
            {
                "optimizer": name,
                "step, ms": 1000 * seconds,
                "times fused": times.median,
                "95 %": times.interval(),
                "first step beyond, s": each.first_seconds - seconds,
                "bytes of state per parameter": state_bytes(each.optimizer, elements),
            }
        )
    record(
        args.json,
        "A step of AdamW on the CPU",
        f"{elements / 1e6:.1f} million float32 parameters in {len(params)} tensors, {args.threads} "
        "threads; medians of alternate rounds in one process, of “times fused” with "
        "its interval. “First step beyond”: what it took more "
        "than a later one.",
        rows,
    )


if __name__ == "__main__":
    main()

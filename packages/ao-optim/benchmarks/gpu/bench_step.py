"""Seconds of a step of AdamW on a GPU, Llama-shaped and on many small tensors; `--smoke 1` on any machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from stepping import contenders, llama_shapes, parameters, state_bytes

from benchmarking import arguments, compared, record, rounds_of

BASELINE = "torch AdamW, fused"


def main() -> None:
    args = arguments(__doc__, rounds=9, smoke=0)
    device = "cpu" if args.smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("needs a GPU; --smoke 1 runs the same code at a small size on the CPU")
    problems = {
        "Llama-shaped": llama_shapes(128, 2, 512) if args.smoke else llama_shapes(1600, 32, 32000),
        "500 small": [(160, 256)] * 500 if not args.smoke else [(64, 80)] * 20,
    }
    rows = [row for name, shapes in problems.items() for row in measure(name, shapes, device, args)]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, small sizes: a smoke test"
    record(
        args.json,
        "A step of AdamW on a GPU",
        f"bfloat16 parameters, {where}; medians of alternate rounds in one process, wall time with the "
        "device waited for. “Share of copy”: bytes that must be read and written, over the time that "
        "copying as many takes.",
        rows,
    )


def measure(name: str, shapes: list[Any], device: str, args: Any) -> list[dict[str, Any]]:
    """A row for each optimizer."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    params = parameters(shapes, torch.bfloat16, device)
    elements = sum(p.numel() for p in params)
    found = contenders(params, wait)

    def seconds_of(call: Any) -> float:
        wait()
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    source = torch.empty(elements, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    measures = {n: lambda e=each: seconds_of(e.optimizer.step) for n, each in found.items()}
    measures["copy"] = lambda: seconds_of(lambda: target.copy_(source))
    samples = rounds_of(measures, args.rounds)
    rate = 2 * elements / median(samples["copy"])
    rows = []
    for optimizer, each in found.items():
        seconds, state = median(samples[optimizer]), state_bytes(each.optimizer, elements)
        # parameters and state are read and written, gradients are read
        moved = elements * (2 * 2 + 2 + 2 * state)
        rows.append(
            {
                "tensors": f"{name}, {elements / 1e6:.0f} M in {len(params)}",
                "optimizer": optimizer,
                "step, ms": 1000 * seconds,
                "times fused": compared(samples, optimizer, BASELINE)[1],
                "share of copy": moved / seconds / rate,
                "first step beyond, s": each.first_seconds - seconds,
                "bytes of state a parameter": state,
            }
        )
    return rows


if __name__ == "__main__":
    main()

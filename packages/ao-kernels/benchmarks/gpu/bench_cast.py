"""Casts of a matrix and of its transpose to float8 on one GPU, beside a copy: see METHOD.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_linear import Contender, copy_bandwidth, environment, interleaved
from torch import Tensor

from ao_core import WHOLE, Spec
from ao_core.tensor.create import encode_reference
from ao_kernels.triton.cast import cast_dual

SHAPES = ((16384, 4096), (16384, 14336), (4096, 4096), (28672, 4096))
BLOCKS = {"tensor": (WHOLE, WHOLE), "row": (1, WHOLE), "block": (1, 128)}


def reference(x: Tensor, numbers: str, scales: str) -> tuple[Tensor, ...]:
    """The parts of both casts by plain torch."""
    spec = Spec(numbers, BLOCKS[scales])
    both = (encode_reference(dense, spec) for dense in (x, x.t()))
    return tuple(parts[name] for parts in both for name in ("qdata", "scale"))


def check(x: Tensor, numbers: str, scales: str) -> None:
    """The fused cast gives what the reference does, but for codes beside the middle of two numbers."""
    pairs = zip(cast_dual(x, numbers, scales), reference(x, numbers, scales), strict=True)
    for found, expected in pairs:
        share = float((found.float() != expected.float()).float().mean())
        if not share < 1e-4:
            raise AssertionError(f"{scales}: {share:.1e} of {tuple(found.shape)} differ")


def contender(
    name: str, cast: Callable[..., Any], scales: str, size: int, copies: list[Tensor]
) -> Contender:
    """One that casts each copy of a matrix; `size` is what it must at least read and write."""
    return Contender(f"{scales}: {name}", size, copies, lambda _, x: cast(x, "f8e4m3", scales))


def measured(shape: tuple[int, int], device: str, bandwidth: float) -> list[dict[str, Any]]:
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    copies = [
        x,
        *(x.clone() for _ in range(int(400e6 // (2 * x.numel())) if device == "cuda" else 0)),
    ]
    compiled = torch.compile(reference) if device == "cuda" else reference
    everyone = []
    for scales in BLOCKS:
        size = x.numel() * (4 if scales == "block" else 6)
        if device == "cuda":
            check(x, "f8e4m3", scales)
            everyone.append(contender("cast_dual", cast_dual, scales, size, copies))
        everyone.append(contender("torch", compiled, scales, size, copies))
    times = interleaved(everyone, x)
    return [
        {
            "shape": list(shape), "contender": each.name, "microseconds": median(times[each.name]) * 1e6,
            "share_of_copy": each.size / median(times[each.name]) / bandwidth,
        }
        for each in everyone
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one small matrix")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(options.device)
    shapes = ((140, 300),) if options.tiny else SHAPES
    with torch.inference_mode():
        lines = [line for shape in shapes for line in measured(shape, options.device, bandwidth)]
    result = {"environment": environment(options.device, bandwidth), "lines": lines}
    print(json.dumps(result, indent=1))
    if options.device == "cuda":
        options.out.mkdir(parents=True, exist_ok=True)
        stem = f"cast-{result['environment']['date'].replace(':', '')}.json"
        (options.out / stem).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

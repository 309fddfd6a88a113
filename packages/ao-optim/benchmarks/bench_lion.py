"""Seconds of a step of Lion on the CPU: 8-bit moments next to foreach operations; torch has no Lion."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.append(str(Path(__file__).parents[2] / "ao-kernels" / "benchmarks" / "gpu"))  # stepping
from stepping import OPTIONS, mixed_shapes, parameters, state_bytes

import ao_optim
from benchmarking import arguments, interleaved, paired, record

BASELINE = "foreach"


class ForeachLion(Optimizer):
    """Lion in float32 with as few foreach operations as it takes."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, dict(OPTIONS))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        params: list[Tensor] = group["params"]
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            self.state[p].setdefault("exp_avg", torch.zeros_like(p))
        moments = [self.state[p]["exp_avg"] for p in params]
        beta1, beta2 = group["betas"]
        moves = torch._foreach_lerp(moments, grads, 1 - beta1)
        torch._foreach_sign_(moves)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, moves, alpha=-group["lr"])
        torch._foreach_lerp_(moments, grads, 1 - beta2)


def main() -> None:
    args = arguments(__doc__, elements=100_000_000, tensors=300, threads=2, rounds=7)
    torch.set_num_threads(args.threads)
    params = parameters(mixed_shapes(args.elements, args.tensors), torch.float32, "cpu")
    elements = sum(p.numel() for p in params)
    optimizers: dict[str, Optimizer] = {
        BASELINE: ForeachLion(params),
        "ao Lion8bit": ao_optim.Lion8bit(params, **OPTIONS),
        "ao Lion8bit, dynamic": ao_optim.Lion8bit(params, state_format="dynamic8", **OPTIONS),
    }
    first = {}
    for name, optimizer in optimizers.items():
        start = time.perf_counter()
        optimizer.step()
        first[name] = time.perf_counter() - start
    samples = interleaved(
        {name: optimizer.step for name, optimizer in optimizers.items()}, rounds=args.rounds
    )
    rows = []
    for name, optimizer in optimizers.items():
        faster = paired(samples, name, BASELINE)
        rows.append(
            {
                "optimizer": name,
                "step, ms": 1000 * median(samples[name]),
                "× foreach": faster.median,
                "95 %": faster.interval(),
                "first step beyond, s": first[name] - median(samples[name]),
                "bytes of state per parameter": state_bytes(optimizer, elements),
            }
        )
    record(
        args.json,
        "A step of Lion on the CPU",
        f"{elements / 1e6:.1f} million float32 parameters in {len(params)} tensors, {args.threads} threads, "
        "in alternate rounds of one process. *× foreach*: how many times as fast as five foreach operations "
        "of torch, the median of the ratios within rounds, with its interval; torch has no fused Lion. "
        "“First step beyond”: what it took more than a later one.",
        rows,
    )


if __name__ == "__main__":
    main()

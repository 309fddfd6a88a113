"""An MLP of which a share of the hidden features is removed, beside the dense one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import cycle
from math import ceil
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from ao_sparsity import ln_structured, remove_channels
from benchmarking import Row, arguments, interleaved, paired, percentile, record

DENSE = "dense"
#: bytes that the copies of the weights of a contender exceed together: more than caches hold
ROTATED = 128 << 20

TEXT = """\
`Linear({k}, {n})`, GELU, `Linear({n}, {k})` in bfloat16 over {m} rows in {threads} threads, and what
`remove_channels` makes of it for shares of the hidden features. Contenders take turns in shuffled rounds
of one process; the weights of each, in copies where need be, exceed {rotated} MiB. *× dense* is how many
times as fast as the dense one, the median over the rounds with its interval; *by flops* is what the
matmuls alone give."""


def mlp(k: int, n: int) -> nn.Sequential:
    """The dense model, in bfloat16."""
    torch.manual_seed(0)
    layers = nn.Linear(k, n), nn.GELU(), nn.Linear(n, k)
    return nn.Sequential(*layers).to(torch.bfloat16).requires_grad_(False)


def contender(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Calls of copies of a model in turn."""
    size = sum(p.nbytes for p in model.parameters())
    copies = [model, *(copy.deepcopy(model) for _ in range(ceil((ROTATED + 1) / size) - 1))]
    turns = cycle(copies)
    return lambda: next(turns)(x)


def measure(k: int, n: int, m: int, rounds: int) -> list[Row]:
    """One row for the dense model and one for each share."""
    dense = mlp(k, n)
    x = torch.randn(m, k).to(torch.bfloat16)
    models: dict[str, nn.Module] = {DENSE: dense}
    for share in (0.25, 0.5, 0.75):
        models[f"{share:.0%} removed"] = remove_channels(
            dense, x, ln_structured(dense, x, share), strict=True
        )[0]
    with torch.inference_mode():
        samples = interleaved({k: contender(v, x) for k, v in models.items()}, rounds=rounds)
    times = {name: paired(samples, name, DENSE) for name in models}
    elements = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    return [
        {
            "MLP": f"{k}×{n}",
            "M": m,
            "contender": name,
            "MiB": 2 * elements[name] / 2**20,
            "ms": median(samples[name]) * 1e3,
            "p10": percentile(samples[name], 10) * 1e3,
            "× dense": times[name].median,
            "95 %": times[name].interval(),
            "by flops": elements[DENSE] / elements[name],
        }
        for name in models
    ]


if __name__ == "__main__":
    args = arguments(__doc__, rounds=12, threads=2, k=4096, n=16384, m=256)
    torch.set_num_threads(args.threads)
    rows = measure(args.k, args.n, args.m, args.rounds)
    text = TEXT.format(**vars(args), rotated=ROTATED >> 20)
    record(args.json, "Structured removal in an MLP", text, rows)

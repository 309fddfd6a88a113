"""A training step of a stack of linear layers with 2:4 weights, compared with that of the dense stack."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from ao_core import kernels
from ao_sparsity import SemiSparseLinear, swap_linear_with_semi_sparse_linear
from ao_sparsity.train.kernels import tile_mask
from benchmarking import arguments, interleaved, paired, record

TEXT = """\
A training step (forward pass, backward pass, `torch.optim.SGD`) of {layers} linear layers {size} × {size} on
{rows} rows in float32, {threads} thread(s), in alternate rounds of one process; and the masks of one such
weight. *× dense*: how many times as long as the step of dense layers, the median of the ratios within
{rounds} rounds, with its interval."""


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """A call that trains the model by one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_reference(call: Callable[[], object]) -> Callable[[], None]:
    """The same without kernels."""

    def step() -> None:
        with kernels("reference"):
            call()

    return step


def main() -> None:
    args = arguments(__doc__, layers=3, size=2048, rows=1024, threads=1, rounds=11)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dense = nn.Sequential(*(nn.Linear(args.size, args.size) for _ in range(args.layers)))
    sparse, plain = (copy.deepcopy(dense) for _ in range(2))
    warnings.simplefilter("ignore")  # which say that no hardware here multiplies sparse operands
    for model in (sparse, plain):
        layers = {str(place): SemiSparseLinear for place in range(args.layers)}
        swap_linear_with_semi_sparse_linear(model, layers)
    x, weight = torch.randn(args.rows, args.size), torch.randn(args.size, args.size)
    samples = interleaved(
        {
            "dense": step_of(dense, x),
            "2:4": step_of(sparse, x),
            "2:4, masks in torch operations": by_reference(step_of(plain, x)),
            "one mask": lambda: tile_mask(weight),
            "one mask, in torch operations": by_reference(lambda: tile_mask(weight)),
        },
        rounds=args.rounds,
    )
    rows = []
    for name, seconds in samples.items():
        times = paired(samples, "dense", name)  # as long
        row = {"what": name, "ms": 1000 * median(seconds)}
        rows.append({**row, "× dense": times.median, "95 %": times.interval()})
    record(args.json, "A step of 2:4 training on the CPU", TEXT.format(**vars(args)), rows)


if __name__ == "__main__":
    main()

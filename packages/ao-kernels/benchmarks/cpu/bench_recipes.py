"""Every recipe of inference × the dense layer, at each number of rows and in each dtype."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
from ao_core import QTensor, quantize_
from ao_core.ext import registry
from ao_core.ext.kernels import select_linear
from benchmarking import Paired, Row, arguments, interleaved, paired, record

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
#: families of recipes for training
OTHERS = ("float8", "compute")
TEXT = """\
A layer of {shape} × {shape} without a bias, in {threads} threads, beside `F.linear` with the dense weight in
the same dtype. Columns are rows of activations: the median of the ratios within {rounds} rounds, greater is
faster. *slowest* is the least of a line, *95 %* its interval, a bootstrap of rounds, *kernel* what served it.
Each contender has {copies} weights in turn, so that none is in a cache because of its last call."""


def recipes() -> list[str]:
    """Names of the recipes of inference."""
    names = (recipe.name for recipe in registry.recipes.values())
    return sorted(n for n in names if "training" not in n and n.partition("/")[0] not in OTHERS)


class Turns:
    """Layers that are called in turn."""

    def __init__(self, layers: list[nn.Linear], x: torch.Tensor) -> None:
        self.layers, self.x, self.next = layers, x, 0

    def __call__(self) -> torch.Tensor:
        """The output of the next layer."""
        self.next = (self.next + 1) % len(self.layers)
        out: torch.Tensor = self.layers[self.next](self.x)
        return out


def layers_of(recipe: str | None, dtype: torch.dtype, shape: int, copies: int) -> list[nn.Linear]:
    """Dense layers, or those that a recipe makes of them."""
    layers = []
    for seed in range(copies):
        layer = nn.Linear(shape, shape, bias=False, device="meta").to_empty(device="cpu").to(dtype)
        generator = torch.Generator().manual_seed(seed)
        layer.weight.data = torch.randn(shape, shape, generator=generator).mul_(0.02).to(dtype)
        if recipe is not None:
            quantize_(layer, recipe)
        layers.append(layer)
    return layers


def line(recipe: str, dtype: str, dense: list[nn.Linear], shape: int, rounds: int) -> Row | None:
    """The row of one recipe; None where it leaves the layer dense."""
    own = layers_of(recipe, DTYPES[dtype], shape, len(dense))
    weight = own[0].weight
    if not isinstance(weight, QTensor):
        return None
    found: dict[int, Paired] = {}
    kernels: dict[int, str] = {}
    for m in ROWS:
        x = torch.randn(m, shape, generator=torch.Generator().manual_seed(m)).to(DTYPES[dtype])
        kernels[m] = select_linear(x, weight).name
        contenders = {"dense": Turns(dense, x), "own": Turns(own, x)}
        samples = interleaved(contenders, rounds=rounds, repeats=len(dense) if m <= 64 else 1)
        found[m] = paired(samples, "own", "dense")
    worst = min(found, key=lambda m: found[m].median)
    return {
        "recipe": recipe,
        "dtype": dtype,
        **{str(m): found[m].median for m in ROWS},
        "slowest": found[worst].median,
        "95 %": found[worst].interval(),
        "kernel": kernels[worst],
    }


def main() -> None:
    args = arguments(
        __doc__, threads=2, rounds=7, shape=4096, copies=4, dtypes=",".join(DTYPES), recipes=""
    )
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    chosen = args.recipes.split(",") if args.recipes else recipes()
    rows = []
    with torch.inference_mode():
        for dtype in args.dtypes.split(","):
            dense = layers_of(None, DTYPES[dtype], args.shape, args.copies)
            for recipe in chosen:
                if (row := line(recipe, dtype, dense, args.shape, args.rounds)) is not None:
                    rows.append(row)
                    print(*row.values(), file=sys.stderr, flush=True)
    values = {name: getattr(args, name) for name in ("threads", "rounds", "shape", "copies")}
    record(
        args.json, "Every recipe on the CPU", TEXT.format(**values), rows, keys=("recipe", "dtype")
    )


if __name__ == "__main__":
    main()

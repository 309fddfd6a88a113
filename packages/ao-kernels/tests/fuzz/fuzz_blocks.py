"""Valid arguments of the ops of decoder blocks, at random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fuzz_arguments import ELEMENTS, Arguments, Random, bits_of, matmul, tile_parts

#: of a weight, as the ops of decoder blocks list them
WEIGHT = (
    "qdata",
    "scale",
    "scale_outer",
    "zero_point",
    "offset",
    "offset_outer",
    "rowsum",
    "table",
)
NUMBERS = ("n", "bits", "group", "span", "kind", "act")


def weight(rng: Random, n: int, k: int, dtype: torch.dtype, prefix: str = "") -> Arguments:
    group = rng.choice([k, rng.randint(1, k), min(k, 32)])
    sizes = {"n": n, "k": k, "bits": rng.randint(1, 8), "group": group}
    found = matmul(rng, sizes, tile_parts(rng, sizes))
    tensors = {name: found[name] for name in WEIGHT}
    tensors["bias"] = rng.choice([None, bits_of(rng, (n,), dtype)])
    numbers = {"numbers": [found[name] for name in NUMBERS]}
    return {prefix + name: value for name, value in (tensors | numbers).items()}


def norm(rng: Random, k: int, dtype: torch.dtype) -> Arguments:
    found = rng.choice([None, bits_of(rng, (k,), dtype)])
    return {"norm": found, "eps": rng.choice([0.0, 1e-5]), "gain": rng.randint(0, 2)}


def qkv(rng: Random) -> Arguments:
    heads, dtype = [rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 20)], rng.choice(ELEMENTS)
    batch, tokens, k = rng.randint(0, 2), rng.randint(0, 3), rng.randint(1, 80)
    shape = (rng.choice([1, max(batch, 1)]), tokens, rng.randint(0, heads[2] // 2) * 2)
    if batch == 0:
        shape = (1, *shape[1:])
    return {
        "x": bits_of(rng, (batch, tokens, k), dtype),
        **norm(rng, k, dtype),
        **weight(rng, (heads[0] + 2 * heads[1]) * heads[2], k, dtype),
        "cosine": bits_of(rng, shape, dtype),
        "sine": bits_of(rng, shape, dtype),
        "heads": heads,
    }


def mlp(rng: Random) -> Arguments:
    dtype, k, wide = rng.choice(ELEMENTS), rng.randint(1, 40), rng.randint(1, 40)
    columns, lead = rng.choice([k, rng.randint(1, 40)]), rng.choice([(), (3,), (2, 9), (0,)])
    output = weight(rng, k, columns, dtype, "output_")
    if columns == k and rng.random() < 0.5:
        output = dict.fromkeys(output) | {"output_numbers": [0]}
    return {
        "x": bits_of(rng, (*lead, columns), dtype),
        "residual": rng.choice([None, bits_of(rng, (*lead, k), dtype)]),
        **norm(rng, k, dtype),
        **output,
        **weight(rng, 2 * wide, k, dtype, "gate_up_"),
        **weight(rng, k, wide, dtype, "down_"),
        "gate": rng.randint(0, 1),
    }


#: op -> valid arguments of it
OPS: dict[str, Callable[[Random], Arguments]] = {"qkv": qkv, "mlp": mlp}

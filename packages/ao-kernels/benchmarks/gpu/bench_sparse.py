"""2:4 and block sparsity on one GPU beside dense products and torch's own: see METHOD.md."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from bench_linear import Contender, check, copy_bandwidth, environment, interleaved
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.spec import NO_SCALE
from ao_core.tensor import native, quantize_tensor
from ao_kernels.triton.sparsify import sparsify24, sparsify24_both, tile_mask

#: matrices that are packed
MATRICES = ((14336, 4096), (4096, 4096), (16384, 4096))
#: a weight of blocks, shares of them that are zeros, rows of activations
BLOCKS, SHARES, MANY = (4096, 16384), (0.4, 0.8, 0.9), (16, 256, 4096)
#: weights in int4, rows of activations
WEIGHTS, FEW = ((4096, 4096), (28672, 4096), (4096, 14336)), (1, 16, 64)
ROTATION = 400e6


def copies_of(one: Any, size: float, rotation: float) -> list[Any]:
    """As many as fill `rotation` bytes."""
    return [one, *(one.clone() for _ in range(int(rotation // size)))]


def packing(x: Tensor, rotation: float) -> list[Contender]:
    """What reads a matrix once, and torch's kernel for both packs."""
    copies = copies_of(x, 2 * x.numel(), rotation)

    def contender(name: str, bytes_: float, pack: Any) -> Contender:
        return Contender(name, int(x.numel() * bytes_), copies, lambda _, each: pack(each))

    greedy = "largest_abs_values_greedy"
    return [
        contender("sparsify24", 3.125, sparsify24),
        contender("tile_mask", 3, tile_mask),
        contender("sparsify24_both", 4.375, lambda each: sparsify24_both(each, "cutlass")),
        contender(
            "torch._sparse_semi_structured_tile",
            4.375,
            lambda each: torch._sparse_semi_structured_tile(each, greedy, True),
        ),
    ]


def product(name: str, weight: Tensor, rotation: float) -> Contender:
    """A linear layer with a weight of any kind."""
    leaves = [leaf for _, leaf in weight.leaves()] if isinstance(weight, QTensor) else [weight]
    if weight.layout == torch.sparse_bsr:
        leaves = [weight.values(), weight.col_indices(), weight.crow_indices()]
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    return Contender(name, size, copies_of(weight, size, rotation), F.linear)


def of_blocks(share: float, x: Tensor, device: str, rotation: float) -> list[Contender]:
    """Products with a weight of which a share of the blocks of 64 × 64 is zeros."""
    dense = torch.randn(BLOCKS, dtype=torch.bfloat16, device=device) * 0.02
    kept = torch.rand(BLOCKS[0] // 64, BLOCKS[1] // 64, device=device) >= share
    dense *= kept.repeat_interleave(64, 0).repeat_interleave(64, 1)
    weight = native(quantize_tensor(dense, Spec("bf16", (1, 1), NO_SCALE, layout="bsr")))
    check(F.linear(x, weight), x, dense)
    found = [product("bf16", dense, rotation), product("ao bsr", weight, rotation)]
    if device == "cuda":
        found.append(product("torch bsr", dense.to_sparse_bsr((64, 64)), rotation))
    return found


def of_int4(shape: tuple[int, int], x: Tensor, device: str, rotation: float) -> list[Contender]:
    """Products with a weight in int4, dense and 2:4, and with one in bfloat16 that is 2:4."""
    dense = torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02
    found = [product("bf16", dense, rotation)]
    for layout, name in (("packed", "ao int4 g128"), ("two_four", "ao int4 2:4 g128")):
        weight = native(quantize_tensor(dense, Spec("int4", (1, 128), "bfloat16", layout=layout)))
        check(F.linear(x, weight), x, weight.dequantize(torch.float32))
        found.append(product(name, weight, rotation))
    if device == "cuda":
        kept = quantize_tensor(dense, Spec("bf16", (1, 1), NO_SCALE, layout="two_four"))
        sparse = torch.sparse.to_sparse_semi_structured(kept.dequantize())
        size = int(dense.numel() * 1.125)
        # its clone shares the values, so it has one copy
        found.append(Contender("torch 2:4 bf16", size, [sparse], F.linear))
    return found


def lines_of(about: dict[str, Any], everyone: list[Contender], x: Tensor, copy: float) -> list[Any]:
    times = interleaved(everyone, x)
    return [
        {
            **about,
            "contender": each.name,
            "microseconds": median(times[each.name]) * 1e6,
            "times_first": median(
                a / b for a, b in zip(times[everyone[0].name], times[each.name], strict=True)
            ),
            "share_of_copy": each.size / median(times[each.name]) / copy,
        }
        for each in everyone
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="little of everything")
    options = parser.parse_args()
    torch.manual_seed(0)
    device, copy, lines = options.device, copy_bandwidth(options.device), []
    rotation = 0 if options.tiny else ROTATION
    matrices, shares, many = (MATRICES, SHARES, MANY) if not options.tiny else ((), (0.9,), (16,))
    weights, few = (WEIGHTS, FEW) if not options.tiny else (((256, 512),), (1,))
    with torch.inference_mode():
        for shape in matrices:
            x = torch.randn(shape, dtype=torch.bfloat16, device=device)
            lines += lines_of({"packed": list(shape)}, packing(x, rotation), x, copy)
        for m in many:
            x = torch.randn(m, BLOCKS[1], dtype=torch.bfloat16, device=device)
            for share in shares:
                everyone = of_blocks(share, x, device, rotation)
                lines += lines_of({"blocks": share, "rows": m}, everyone, x, copy)
        for m in few:
            for shape in weights:
                x = torch.randn(m, shape[1], dtype=torch.bfloat16, device=device)
                everyone = of_int4(shape, x, device, rotation)
                lines += lines_of({"int4": list(shape), "rows": m}, everyone, x, copy)
    result = {"environment": environment(device, copy), "lines": lines}
    print(json.dumps(result, indent=1))
    if device == "cuda":
        options.out.mkdir(parents=True, exist_ok=True)
        stem = f"sparse-{result['environment']['date'].replace(':', '')}.json"
        (options.out / stem).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

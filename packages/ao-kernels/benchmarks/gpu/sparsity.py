"""2:4 and block sparsity, beside dense matmuls and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Case, Contender, Line, Setup, built, measured, of_matmul
from torch import Tensor
from weights import of_dense

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import NO_SCALE, repack
from ao_kernels.triton.sparsify.op import sparsify24, sparsify24_both, tile_mask

#: weights in int4 and rows of activations; matrices that are packed
WEIGHTS, FEW = ((28672, 4096), (4096, 4096), (4096, 14336)), (1, 16, 64)
MATRICES = ((14336, 4096), (4096, 4096), (16384, 4096))
#: a weight of blocks of 64 × 64, shares of them that are zeros, rows of activations
BLOCKS, SHARES, MANY = (4096, 16384), (0.8, 0.9, 0.4), (16, 256, 4096)


def cases(setup: Setup) -> list[Case]:
    """Matmuls with int4, with blocks, then packing."""
    if setup.tiny:
        return [
            Case("int4", partial(of_int4, setup, (256, 512), (1,))),
            Case("blocks", partial(of_blocks, setup, (256, 512), 0.5, (16,))),
        ]
    return [
        *(Case(f"int4 {shape}", partial(of_int4, setup, shape, FEW)) for shape in WEIGHTS),
        *(Case(f"blocks {s}", partial(of_blocks, setup, BLOCKS, s, MANY)) for s in SHARES),
        *(Case(f"packing {shape}", partial(packing, setup, shape)) for shape in MATRICES),
    ]


def of_int4(setup: Setup, shape: tuple[int, int], rows: tuple[int, ...]) -> Iterator[Line]:
    """Dense and 2:4 in int4, and what torch has for 2:4 in bfloat16."""
    dense = setup.randn(*shape) * 0.02
    makers: dict[str, Callable[[], Contender]] = {"bf16": partial(of_dense, setup, dense)}
    for layout, name in (("packed", "ao int4 g128"), ("two_four", "ao int4 2:4 g128")):
        spec = Spec("int4", (1, 128), "bfloat16", layout=layout)
        makers[name] = partial(quantized, setup, dense, spec)
    if dense.is_cuda:
        makers["torch 2:4 bf16"] = partial(of_torch_24, dense)
    everyone = built(makers)
    for m in rows:
        about = {"kind": "int4", "shape": list(shape), "rows": m}
        yield from measured(setup, everyone, setup.randn(m, shape[1]), about)


def of_blocks(
    setup: Setup, shape: tuple[int, int], share: float, rows: tuple[int, ...]
) -> Iterator[Line]:
    """A weight of which a share of the blocks of 64 × 64 is zeros."""
    n, k = shape
    kept = torch.rand(n // 64, k // 64, device=setup.device) >= share
    kept[:, 0] = True
    dense = setup.randn(n, k) * 0.02 * kept.repeat_interleave(64, 0).repeat_interleave(64, 1)
    makers: dict[str, Callable[[], Contender]] = {
        "bf16": partial(of_dense, setup, dense),
        "ao bsr": partial(quantized, setup, dense, Spec("bf16", (1, 1), NO_SCALE, layout="bsr")),
    }
    if dense.is_cuda:
        makers["torch bsr"] = partial(of_torch_bsr, setup, dense)
    everyone = built(makers)
    for m in rows:
        about = {"kind": "blocks", "name": f"{share:.0%} zeros", "shape": list(shape), "rows": m}
        yield from measured(setup, everyone, setup.randn(m, k), about)


def quantized(setup: Setup, dense: Tensor, spec: Spec) -> Contender:
    """A linear layer with a weight of ao."""
    weight: QTensor = repack(quantize_tensor(dense, spec))
    size = weight.stored_bytes
    return Contender(setup.copies(weight, size), F.linear, size, error=of_matmul(weight))


def of_torch_24(dense: Tensor) -> Contender:
    """One copy: a copy of it shares its values."""
    kept = quantize_tensor(dense, Spec("bf16", (1, 1), NO_SCALE, layout="two_four"))
    sparse = torch.sparse.to_sparse_semi_structured(kept.dequantize())
    return Contender([sparse], F.linear, int(dense.numel() * 1.125))


def of_torch_bsr(setup: Setup, dense: Tensor) -> Contender:
    """Torch's own blocks."""
    weight = dense.to_sparse_bsr((64, 64))
    parts = (weight.values(), weight.col_indices(), weight.crow_indices())
    size = sum(part.numel() * part.element_size() for part in parts)
    return Contender(
        [weight, *(weight.clone() for _ in range(setup.count(size) - 1))], F.linear, size
    )


def packing(setup: Setup, shape: tuple[int, int]) -> Iterator[Line]:
    """What reads a matrix once, and torch's kernel for both packs."""
    x = setup.randn(*shape)
    copies = setup.copies(x, 2 * x.numel())
    greedy = "largest_abs_values_greedy"
    calls: dict[str, tuple[float, Callable[[Tensor], Any]]] = {
        "torch": (4.375, lambda each: torch._sparse_semi_structured_tile(each, greedy, True)),
        "ao sparsify24_both": (4.375, lambda each: sparsify24_both(each, "cutlass")),
        "ao sparsify24": (3.125, sparsify24),
        "ao tile_mask": (3, tile_mask),
    }

    def contender(width: float, call: Callable[[Tensor], Any]) -> Contender:
        return Contender(copies, lambda _, each: call(each), int(width * x.numel()))

    makers = {name: partial(contender, *each) for name, each in calls.items()}
    yield from measured(setup, built(makers), x, {"kind": "packing", "shape": list(shape)})

"""Linear layers with quantized weights, beside dense ones, torch's int4, and other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Case, Contender, Line, Makers, Setup, built, measured, of_matmul
from peers import PEERS, Peer, tinygemm
from shapes import FLUX, LLAMA, MIXTRAL, TINY, Shapes
from torch import Tensor

from ao_core import WHOLE, Call, Spec, kernels, quantize_tensor
from ao_core.ext import repack
from ao_core.ext.kernels import select

FORMATS = {
    "int4 g128": Spec("int4", (1, 128), "bfloat16", layout="packed"),
    "int8": Spec("int8", (1, WHOLE), "float32"),
    "int4 g64 zero": Spec("uint4", (1, 64), "bfloat16", "float", layout="packed"),
    "nf4 g64": Spec("nf4", (1, 64), "bfloat16", layout="packed"),
    "float8": Spec("f8e4m3", (1, WHOLE), "float32"),
}
#: those that kernels in CUDA C++ serve for few rows: measured by the ones in Triton too
IN_CUDA = ("int4 g128", "int8", "int4 g64 zero", "float8")
#: rows of activations that bars are about, and the others
FIRST, THEN = (1, 16, 64, 128, 256), (8, 32, 1024, 4096)
ALL = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
#: shapes and rows that other libraries are measured at
PEER_SHAPES, PEER_ROWS = ("gate_up", "o", "down", "qkv"), (1, 8, 32, 64)
DENSE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def cases(setup: Setup) -> list[Case]:
    """The most important first."""
    if setup.tiny:
        return [_case(setup, name, shape, (1, 17)) for name, shape in TINY.items()]
    of_llama = [_case(setup, name, shape, FIRST) for name, shape in LLAMA.items()]
    of_peers = [
        Case(f"{name} beside {peer.module}", partial(beside, setup, name, LLAMA[name], peer))
        for name in PEER_SHAPES
        for peer in PEERS
        if peer.is_there
    ]
    rest: list[tuple[Shapes, tuple[int, ...]]] = [(LLAMA, THEN), (MIXTRAL, ALL), (FLUX, ALL)]
    others = [_case(setup, name, shape, m) for some, m in rest for name, shape in some.items()]
    return [*of_llama, *of_peers, *others]


def _case(setup: Setup, name: str, shape: tuple[int, ...], rows: tuple[int, ...]) -> Case:
    """All formats, with weights that are made once for all numbers of rows."""

    def run() -> Iterator[Line]:
        dense = setup.randn(*shape) * 0.02
        makers = {"bf16": partial(of_dense, setup, dense)}
        for fmt in FORMATS:
            makers[f"ao {fmt}"] = partial(ours, setup, dense, fmt)
        for fmt in IN_CUDA:
            makers[f"ao {fmt} in Triton"] = partial(in_triton, setup, dense, fmt)
        if dense.is_cuda:
            makers["torch int4 g128"] = partial(tinygemm, setup, shape)
        yield from lines(setup, name, makers, shape, rows, torch.bfloat16)

    return Case(f"{name}, {min(rows)} to {max(rows)} rows", run)


def beside(setup: Setup, name: str, shape: tuple[int, ...], peer: Peer) -> Iterator[Line]:
    """Another library, with our format that is nearest; one that crashes takes this case alone."""
    dense = setup.randn(*shape, dtype=peer.dtype) * 0.02
    makers: dict[str, partial[Contender]] = {
        DENSE[peer.dtype]: partial(of_dense, setup, dense),
        **{f"ao {fmt}": partial(ours, setup, dense, fmt) for fmt in peer.formats},
        **{who: partial(make, setup, dense) for who, make in peer.makers.items()},
    }
    yield from lines(setup, name, makers, shape, PEER_ROWS, peer.dtype)


def lines(
    setup: Setup,
    name: str,
    makers: Makers,
    shape: tuple[int, ...],
    rows: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterator[Line]:
    """Of all numbers of rows."""
    everyone = built(makers)
    for m in rows:
        about = {"name": name, "shape": list(shape), "rows": m}
        yield from measured(setup, everyone, setup.randn(m, shape[1], dtype=dtype), about)


def of_dense(setup: Setup, dense: Tensor) -> Contender:
    """`F.linear` of torch."""
    size = dense.numel() * dense.element_size()
    return Contender(setup.copies(dense, size), F.linear, size, lambda x: "F.linear")


def ours(setup: Setup, dense: Tensor, fmt: str) -> Contender:
    """A format of ao, in the layout of its best kernel."""
    weight = repack(quantize_tensor(dense, FORMATS[fmt]))
    size = weight.stored_bytes

    def kernel(x: Tensor) -> str:
        shape, device = tuple(weight.shape), x.device.type
        return select(Call("linear", weight.spec, shape, tuple(x.shape), x.dtype, device)).name

    copies = setup.copies(weight, size)
    return Contender(copies, F.linear, size, kernel, error=of_matmul(weight))


def in_triton(setup: Setup, dense: Tensor, fmt: str) -> Contender:
    """The same by the kernels in Triton alone."""
    whole = ours(setup, dense, fmt)

    def call(x: Tensor, weight: Any) -> Tensor:
        with kernels("compiled"):
            return F.linear(x, weight)

    def kernel(x: Tensor) -> str:
        with kernels("compiled"):
            return whole.kernel(x)

    return replace(whole, call=call, kernel=kernel)

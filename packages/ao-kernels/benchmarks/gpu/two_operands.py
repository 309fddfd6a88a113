"""Matmuls whose operands are both in 8 bits: linear layers, and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from measuring import (
    Case,
    Contender,
    Line,
    Makers,
    Setup,
    built,
    compiled,
    distance,
    measured,
    of_matmul,
)
from peers import compiled_linear, torchao_weight
from shapes import EXPERTS, FLUX, LLAMA, MIXTRAL, TINY, TINY_EXPERTS, Shapes
from torch import Tensor
from weights import of_dense

from ao_core import WHOLE, Call, QTensor, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.kernels import encode_parts
from ao_kernels.triton.scaled_mm.records import grouped_mm, mm
from ao_kernels.triton.w4a8 import records as dynamic4

ROW, TENSOR, GROUP, SQUARE = (1, WHOLE), (WHOLE, WHOLE), (1, 128), (128, 128)
KINDS = {
    "float8 rows": Spec("f8e4m3", ROW, act=Spec("f8e4m3", ROW)),
    "int8 rows": Spec("int8", ROW, act=Spec("int8", ROW)),
    "float8 blocks": Spec("f8e4m3", SQUARE, act=Spec("f8e4m3", GROUP)),
    "float8 gradients": Spec("f8e4m3", GROUP, act=Spec("f8e4m3", GROUP)),
    "int8 zero points": Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int")),
}
#: weights in 4 bits, and activations in 8
IN_4_BITS = {
    "uint8 × int4 32": Spec("int4", (1, 32), "bfloat16", act=Spec("uint8", ROW, zero_point="int")),
    "int8 × int4 128": Spec("int4", (1, 128), "bfloat16", act=Spec("int8", ROW)),
    "float8 × int4 128": Spec("int4", (1, 128), "bfloat16", act=Spec("f8e4m3", ROW)),
}
#: what torch has, and the kernel of ao-core that calls it
OF_TORCH = {
    "float8 tensors": (Spec("f8e4m3", TENSOR, act=Spec("f8e4m3", TENSOR)), "scaled_matmul"),
    "float8 rows": (KINDS["float8 rows"], "scaled_matmul"),
    "int8 rows": (KINDS["int8 rows"], "int_matmul"),
}
OF_TORCHAO = {
    "float8 rows": "Float8DynamicActivationFloat8WeightConfig",
    "int8 rows": "Int8DynamicActivationInt8WeightConfig",
}
ROWS, TOKENS = (1, 16, 128, 1024, 4096, 16384), (16, 128, 1024, 4096)
#: experts that a token goes to
CHOSEN = 2


def cases(setup: Setup) -> list[Case]:
    """Matmuls of Llama-3-8B, then experts, then the other models."""

    def matmuls(shapes: Shapes, rows: tuple[int, ...]) -> list[Case]:
        return [Case(n, partial(linear, setup, n, s, rows)) for n, s in shapes.items()]

    def mixtures(shapes: Shapes, tokens: tuple[int, ...]) -> list[Case]:
        return [Case(n, partial(experts, setup, n, s, tokens)) for n, s in shapes.items()]

    if setup.tiny:
        return [*matmuls(TINY, (17,)), *mixtures(TINY_EXPERTS, (8,))]
    return [
        *matmuls(LLAMA, ROWS),
        *mixtures({**EXPERTS, "64 small experts": (64, 4096, 2048)}, TOKENS),
        *matmuls({**MIXTRAL, **FLUX}, ROWS),
    ]


def dtype_of(setup: Setup) -> torch.dtype:
    """Of activations: NumPy, with which Triton interprets, has no bfloat16."""
    return torch.bfloat16 if setup.device == "cuda" else torch.float16


def linear(
    setup: Setup, name: str, shape: tuple[int, ...], rows: tuple[int, ...]
) -> Iterator[Line]:
    """Everyone, each with the cast of the activations; weights are cast before."""
    dense = setup.randn(*shape, dtype=dtype_of(setup)) * 0.02
    makers: dict[str, Callable[[], Contender]] = {"bf16": partial(of_dense, setup, dense)}
    for kind, spec in KINDS.items():
        makers[f"ao {kind}"] = partial(ours, setup, dense, spec)
    for kind, spec in IN_4_BITS.items():
        makers[f"ao {kind}"] = partial(in_4_bits, setup, dense, spec)
    if dense.is_cuda:
        for kind, (spec, kernel) in OF_TORCH.items():
            makers[f"torch {kind}"] = partial(of_torch, setup, dense, spec, kernel)
        for kind, config in OF_TORCHAO.items() if find_spec("torchao") else ():
            makers[f"torchao {kind}"] = partial(of_torchao, setup, dense, config)
    everyone = built(makers)
    for m in rows:
        about = {"name": name, "shape": list(shape), "rows": m}
        x = setup.randn(m, shape[1], dtype=dense.dtype)
        yield from measured(setup, everyone, x, about)


def cast(dense: Tensor, spec: Spec) -> QTensor:
    """The weight in codes, as a layer has it."""
    plain = Spec(spec.dtype, spec.block, spec.scale_dtype)
    return QTensor(encode_parts(dense, plain), plain, tuple(dense.shape), dense.dtype)


def ours(setup: Setup, dense: Tensor, spec: Spec) -> Contender:
    """The Triton matmul."""
    copies = setup.copies(cast(dense, spec), dense.numel())
    call = partial(_times, spec=spec)
    return Contender(copies, call, error=of_matmul(dense), bound=6e-2)


def in_4_bits(setup: Setup, dense: Tensor, spec: Spec) -> Contender:
    """The Triton matmul with a weight that is loaded in 4 bits."""
    packed = quantize_tensor(dense, replace(spec, layout="packed"))
    copies = setup.copies(to_layout(packed, "plane32"), dense.numel() // 2)
    return Contender(copies, in_planes, error=of_matmul(dense), bound=0.2)


def in_planes(x: Tensor, w: QTensor) -> Tensor:
    """A linear layer without bias."""
    return dynamic4.linear(x, w, None)


def _times(x: Tensor, w: QTensor, spec: Spec) -> Tensor:
    return mm(x, w, spec)


def of_torch(setup: Setup, dense: Tensor, spec: Spec, kernel: str) -> Contender:
    """`_scaled_mm`, or `_int_mm` and what scales its result, compiled."""
    found, shape = registry.kernels.get(kernel), tuple(dense.shape)
    call = Call("mm", spec, shape, (128, shape[1]), dense.dtype, setup.device)
    if reason := found.refuses(call):
        raise ValueError(f"{kernel}: {reason}")
    copies = setup.copies(cast(dense, spec), dense.numel())
    return Contender(copies, kernel_of_torch(kernel, spec), kernel=lambda x: kernel)


@cache
def kernel_of_torch(kernel: str, spec: Spec) -> Callable[[Tensor, QTensor], Tensor]:
    """Compiled once for all shapes."""
    fn = registry.kernels.get(kernel).fn
    return compiled(lambda x, w: fn(x, w, spec))


def of_torchao(setup: Setup, dense: Tensor, config: str) -> Contender:
    """The same by torchao, compiled."""
    import torchao.quantization as of

    options: dict[str, Any] = {"granularity": of.PerRow()} if "Float8" in config else {}
    chosen = getattr(of, config)(**options)
    copies = [torchao_weight(dense, chosen) for _ in range(setup.count(dense.numel()))]
    return Contender(copies, compiled_linear())


def experts(
    setup: Setup, name: str, shape: tuple[int, ...], tokens: tuple[int, ...]
) -> Iterator[Line]:
    """Experts with rows that differ by some, beside torch's matmul in bfloat16."""
    dense = setup.randn(*shape, dtype=dtype_of(setup)) * 0.02
    for m in tokens:
        offs = offsets(m * CHOSEN, shape[0], setup.device)
        makers: Makers = {
            "bf16": partial(dense_experts, dense, offs),
            **{
                f"ao {kind}": partial(our_experts, dense, offs, KINDS[kind])
                for kind in ("float8 rows", "int8 rows", "float8 blocks")
            },
        }
        x = setup.randn(m * CHOSEN, shape[2], dtype=dense.dtype)
        about = {"name": name, "shape": list(shape), "rows": m * CHOSEN}
        yield from measured(setup, built(makers), x, about)


def offsets(rows: int, count: int, device: str) -> Tensor:
    """Where the rows of each expert end."""
    share = torch.rand(count, device=device) + 0.5
    offs = (share.cumsum(0) / share.sum() * rows).to(torch.int32)
    offs[-1] = rows
    return offs


def dense_experts(dense: Tensor, offs: Tensor) -> Contender:
    """One copy: the experts of a layer fill no cache."""

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)

    def interpreted(x: Tensor, w: Tensor) -> Tensor:
        return by_expert(x, w, offs)

    size = dense.numel() * dense.element_size()
    return Contender([dense], multiply if dense.is_cuda else interpreted, size)


def our_experts(dense: Tensor, offs: Tensor, spec: Spec) -> Contender:
    """In one launch, with the cast of the activations."""

    def error(x: Tensor, found: Tensor) -> float:
        return distance(found.float(), by_expert(x, dense, offs).float())

    call = partial(_grouped, offs=offs, spec=spec)
    return Contender([cast(dense, spec)], call, dense.numel(), error=error, bound=6e-2)


def _grouped(x: Tensor, w: QTensor, offs: Tensor, spec: Spec) -> Tensor:
    return grouped_mm(x, w, offs, spec)


def by_expert(x: Tensor, dense: Tensor, offs: Tensor) -> Tensor:
    """Expert by expert."""
    begins = [0, *offs.tolist()]
    parts = zip(begins, begins[1:], dense, strict=False)
    return torch.cat([F.linear(x[begin:end], expert) for begin, end, expert in parts])

"""Trials of the op "attend": against the softmax over all tokens at once, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.records import Kernel, OpCall
from ao_core.registry import registry
from ao_core.spec import NO_SCALE, WHOLE, Spec
from ao_core.tensor.attention import AttendCall, Attention
from ao_core.tensor.qtensor import QTensor
from ao_core.testing.base import gaussian
from ao_core.testing.samples import holds, quantized
from ao_core.testing.trials import KernelCase, OpTrial, strided_variants

__all__ = ["ATTEND", "Attending", "attended"]

_TOKEN = Spec("int8", (1, WHOLE), "float16")
_CHANNEL = Spec("uint4", (128, 1), "float16", "int", "packed")
_GROUP = Spec("uint4", (1, 64), "float16", "int", "packed")
_FLOAT8 = Spec("f8e4m3", (1, WHOLE), "bfloat16")
_DENSE = Spec("fp32", (1, WHOLE), NO_SCALE)


@dataclass(frozen=True)
class Attending:
    """What differs between the calls of a case."""

    #: queries, the last tokens
    queries: int
    #: heads of queries that read one of keys
    group: int = 1
    #: how many tokens of the memory are used; None: all
    coded: int | None = None
    #: tokens in the tail
    recent: int = 0
    centered: bool = False
    #: tokens of padding in the first row of the batch; more in others
    padding: int | None = None
    sinks: bool = False
    causal: bool = True
    window: int = 0
    softcap: float = 0.0


class _Attend(OpTrial):
    """A batch is an `Attending`; the shape of a case that of the keys. Values have 8 elements more."""

    specs: Sequence[Any] = (
        (_TOKEN, _TOKEN),
        (_TOKEN, _GROUP),
        (_CHANNEL, _GROUP),
        (_FLOAT8, _FLOAT8),
        (_DENSE, _DENSE),
        (Spec("int8", (1, 16), "bfloat16"), Spec("nf4", (1, 32), layout="packed")),
    )
    shapes = ((2, 2, 300, 64), (1, 3, 130, 40))
    batches: Sequence[Any] = (
        Attending(1),
        Attending(1, 4, 129, 70, centered=True),
        Attending(5, 3, 128, 3),
        Attending(1, 2, 0, 1),
        Attending(3, 2, 0, 3, sinks=True),
        Attending(0, 2, 100),
        Attending(2, 1, 0, 0, causal=False),
        Attending(7, 2, 130, 100, True, padding=5, sinks=True),
        Attending(130, 1, 127, 3, padding=126),
        Attending(9, 2, 130, 90, window=20),
        Attending(1, 2, 130, 90, window=150, padding=100),
        Attending(4, 2, 77, causal=False, centered=True),
        Attending(1, 3, 130, 5, softcap=1.5, centered=True, sinks=True),
    )

    def operands(
        self, kernel: Kernel, shape: tuple[int, ...], specs: Sequence[Any]
    ) -> Sequence[tuple[Spec, ...]]:
        """The pairs whose formats hold such tensors, and whose first is in the kernel's layout."""
        return [
            pair
            for pair in specs
            if kernel.layout in ("*", pair[0].layout)
            and all(holds(registry.layouts.get(spec.layout), shape, spec) for spec in pair)
        ]

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        return [spec for spec in specs if holds(layout, shape, spec)]

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        rows, heads, _, dim = case.shape
        key, value = case.specs
        return AttendCall(
            key,
            value,
            (rows, heads * batch.group, batch.queries, dim),
            case.shape,
            dim + 8,
            _slots(batch),
            case.dtype,
            _mode(batch, dim),
            batch.centered,
            batch.padding is not None,
            batch.sinks,
            case.device,
            op,
        )

    def odd_calls(self, call: Any) -> Iterator[OpCall]:
        for dtype in (torch.float16, torch.float64):
            yield replace(call, dtype=dtype)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        rows, heads, size, dim = case.shape
        device, dtype = case.device, case.dtype

        def draw(place: int, *shape: int) -> Tensor:
            return gaussian(shape, seed=20 * seed + place, device=device).to(dtype)

        key, value = (
            quantized(draw(place, rows, heads, size, width), spec)
            for place, (width, spec) in enumerate(zip((dim, dim + 8), case.specs, strict=True))
        )
        coded = size if batch.coded is None else batch.coded
        tokens, slots = coded + batch.recent, _slots(batch)
        tail = [draw(place, rows, heads, slots, width) for place, width in ((2, dim), (3, dim + 8))]
        unused = torch.ones(slots, dtype=torch.bool, device=device)
        unused[torch.arange(coded, tokens, device=device) % max(slots, 1)] = False
        for each in tail:  # memory of no token
            each[:, :, unused] = torch.nan
        q = draw(4, rows, heads * batch.group, batch.queries, dim)
        center = draw(5, rows, heads, 1, dim).float() if batch.centered else None
        start = None
        if batch.padding is not None:
            start = torch.arange(rows, device=device) + batch.padding
        sinks = draw(6, heads * batch.group) if batch.sinks else None
        args = (
            q,
            key,
            value,
            torch.tensor([tokens, coded], device=device),
            *(tail if slots else (None, None)),
            center,
            start,
            sinks,
            _mode(batch, dim),
        )
        yield args, attended(*args)

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for q in strided_variants(args[0]):
            yield (q, *args[1:])
        if args[4] is not None:
            tails = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[4:6]]
            yield (*args[:4], *tails, *args[6:])


def _slots(batch: Attending) -> int:
    return batch.recent + 6 if batch.recent else 0


def _mode(batch: Attending, dim: int) -> Attention:
    return Attention(dim**-0.5, batch.causal, batch.window, batch.softcap)


def attended(
    q: Tensor,
    key: QTensor,
    value: QTensor,
    counts: Tensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    start: Tensor | None,
    sinks: Tensor | None,
    attention: Attention,
) -> Tensor:
    """What the op computes, in float64 and with repeated heads."""
    tokens, coded = counts.tolist()
    slots = torch.arange(coded, tokens, device=q.device)
    both = []
    for stored, tail, offset in ((key, tail_key, center), (value, tail_value, None)):
        values = stored.dequantize(torch.float32)[:, :, :coded].double()
        values = values if offset is None else values + offset.double()
        if tail is not None:
            values = torch.cat([values, tail[:, :, slots % tail.shape[2]].double()], 2)
        both.append(values.repeat_interleave(q.shape[1] // key.shape[1], 1))
    logits = attention.scale * (q.double() @ both[0].transpose(-2, -1))
    if attention.softcap:
        logits = attention.softcap * (logits / attention.softcap).tanh()
    place = torch.arange(tokens, device=q.device)
    own = torch.arange(tokens - q.shape[2], tokens, device=q.device)[:, None]
    seen = torch.ones(q.shape[0], 1, q.shape[2], tokens, dtype=torch.bool, device=q.device)
    if attention.causal:
        seen &= place <= own
    if attention.window:
        seen &= place > own - attention.window
    if start is not None:
        seen &= place >= start[:, None, None, None]
    weights = logits.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (weights / torch.where(total == 0, 1.0, total)) @ both[1]


#: what `Op.trials` returns
ATTEND = _Attend()

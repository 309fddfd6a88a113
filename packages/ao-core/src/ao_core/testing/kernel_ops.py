"""Trials of the ops of ao-core with matmuls, and lookups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.records import Call, Kernel, OpCall
from ao_core.registry import registry
from ao_core.spec import TENSOR, WHOLE, Spec
from ao_core.tensor import QTensor, fake_quantize, quantize_tensor
from ao_core.testing.base import gaussian
from ao_core.testing.samples import activations, quantized
from ao_core.testing.trials import KERNEL_SPECS, KernelCase, OpTrial

__all__ = ["EMBEDDING", "GROUPED_LINEAR", "GROUPED_MM", "LINEAR", "MM"]

_TENSOR = (WHOLE, WHOLE)
#: batches in which one element of the activations is NaN, as is all that follows from it
_WITH_NAN = ((3,), (17,))


@lru_cache(maxsize=4)
def _weight(spec: Spec, shape: tuple[int, ...], device: str, epoch: int) -> tuple[QTensor, Tensor]:
    """A weight, and its values in float64; `epoch` is that of the tables that it was made by."""
    w = quantized(gaussian(shape, device=device), spec)
    return w, w.dequantize(torch.float32).double()


class _Linear(OpTrial):
    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        n, k = case.shape
        w, dense = _weight(case.spec, case.shape, case.device, registry.epoch)
        x = gaussian((*batch, k), seed=seed, device=case.device).to(case.dtype)
        if batch in _WITH_NAN:
            # a matmul with zeros that are not stored need not look at what they are multiplied by
            x[1, k // 2 if w.sparsity is None else slice(None)] = torch.nan
        bias = gaussian((n,), seed=99, device=case.device).to(case.dtype)
        matmul = F.linear(activations(x, w), dense)
        yield (x, w, bias), matmul + bias.double()
        yield (x, w, None), matmul


class _Embedding(OpTrial):
    dtypes = (torch.float32,)

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        return Call(op, case.spec, case.shape, batch, torch.int64, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        w = quantized(gaussian(case.shape, device=case.device).to(case.dtype), case.spec)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, case.shape[0], batch, generator=generator).to(case.device)
        yield (ids, w), F.embedding(ids, w.dequantize()).double()


def _cast_matmul(a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """``a @ b.T`` (float64) of the values that both operands are cast to."""
    assert spec.act is not None
    casts = fake_quantize(a.float(), spec.act), fake_quantize(b.float(), spec)
    return casts[0].double() @ casts[1].double().t()


class _Mm(OpTrial):
    def layouts(self, kernel: Kernel) -> Sequence[Layout]:
        return [registry.layouts.get("plain")]  # both operands are dense

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        # dense operands have no parts to keep a static scale in
        if len(batch) != 1 or case.spec.act is None or case.spec.act.is_static:
            return None
        return super().call(op, case, batch)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        b = gaussian(case.shape, device=case.device).to(case.dtype)
        a = gaussian((*batch, case.shape[1]), seed=seed, device=case.device).to(case.dtype)
        expected = _cast_matmul(a, b, case.spec)
        yield (a, b, case.spec), expected
        yield (a, quantize_tensor(b, replace(case.spec, act=None)), case.spec), expected


class _GroupedLinear(OpTrial):
    """A batch is the number of rows of each expert and of those behind, or of all of them alike."""

    # one scale for all activations is one for each expert's
    specs = tuple(
        spec
        for spec in KERNEL_SPECS
        if spec.act is None or not (spec.act.is_static or spec.act.block == TENSOR)
    )
    shapes = ((4, 16, 64), (3, 33, 70))
    batches = ((0,), (1,), (5,), (1, 0, 6, 2), (3, 17, 0, 0), (0, 0, 0, 4))

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        experts, _, k = case.shape
        x_shape = (experts, *batch, k) if len(batch) == 1 else (sum(batch), k)
        return Call(op, case.spec, case.shape, x_shape, case.dtype, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        experts, n, k = case.shape
        w = quantized(gaussian(case.shape, device=case.device), case.spec)
        alike = len(batch) == 1
        rows = [*batch] * experts if alike else [*batch[:experts]]
        total = sum(batch) if not alike else sum(rows)
        x = gaussian((total, k), seed=seed, device=case.device).to(case.dtype)
        ends = torch.tensor(rows).cumsum(0).to(torch.int32)
        dense = w.dequantize(torch.float32).double()
        expected = dense.new_zeros(total, n)
        for expert, (end, count) in enumerate(zip(ends.tolist(), rows, strict=True)):
            part = slice(end - count, end)
            expected[part] = activations(x[part], w, expert) @ dense[expert].t()
        if alike:
            yield (x.view(experts, *batch, k), w, None), expected.view(experts, *batch, n)
        else:
            yield (x, w, ends.to(case.device)), expected


class _GroupedMm(_GroupedLinear):
    """Experts are dense and cast by themselves; those that share rows, and those that are rows."""

    specs = tuple(spec for spec in KERNEL_SPECS if spec.act is not None and not spec.act.is_static)

    def layouts(self, kernel: Kernel) -> Sequence[Layout]:
        return [registry.layouts.get("plain")]

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        experts, n, k = case.shape
        spec, alike = case.spec, len(batch) == 1
        rows = [*batch] * experts if alike else [*batch[:experts]]
        total = sum(rows if alike else batch)

        def draw(*shape: int) -> Tensor:
            return gaussian(shape, seed=seed, device=case.device).to(case.dtype)

        a, b = draw(total, k), draw(experts, n, k)
        parts = zip(a[: sum(rows)].split(rows), b, strict=True)
        expected = F.pad(
            torch.cat([_cast_matmul(*pair, spec) for pair in parts]),
            (0, 0, 0, total - sum(rows)),
        )
        if alike:
            yield (a.view(experts, *batch, k), b, None, spec), expected.view(experts, *batch, n)
            return
        offs = torch.tensor(rows, device=case.device).cumsum(0).to(torch.int32)
        yield (a, b, offs, spec), expected
        cut, other = a.t(), draw(n, total)
        share = [
            _cast_matmul(rows_of_a, rows_of_b, spec)
            for rows_of_a, rows_of_b in zip(
                other[:, : sum(rows)].split(rows, 1),
                cut[:, : sum(rows)].split(rows, 1),
                strict=True,
            )
        ]
        yield (other, cut, offs, spec), torch.stack(share)


LINEAR = _Linear()
EMBEDDING = _Embedding()
GROUPED_LINEAR = _GroupedLinear()
GROUPED_MM = _GroupedMm()
MM = _Mm()

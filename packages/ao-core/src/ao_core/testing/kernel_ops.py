"""Part of `KernelSuite`: how each op is called, and what must come out. Here those with products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.layouts import Layout
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import QTensor, fake_quantize, quantize_tensor
from ao_core.testing.base import gaussian, same_bits
from ao_core.testing.samples import SPECS, activations, holds, quantized

__all__ = ["KERNEL_SPECS", "PRODUCTS", "KernelCase", "OpTrial"]

_ROW, _TENSOR = (1, WHOLE), (WHOLE, WHOLE)
#: `SPECS`, zero points of values, and formats whose activations are quantized too
KERNEL_SPECS: tuple[Spec, ...] = (
    *SPECS,
    Spec("uint4", (1, 16), scale_dtype="float16", zero_point="offset"),
    Spec("int8", _ROW, scale_dtype="bfloat16"),
    Spec("f8e5m2", _ROW, scale_dtype="bfloat16"),
    Spec("int8", _ROW, act=Spec("int8", _ROW)),
    Spec("int8", _ROW, act=Spec("uint8", _ROW, zero_point="int")),
    Spec("f8e4m3", _ROW, act=Spec("f8e4m3", _ROW)),
    Spec("f8e4m3", (WHOLE, WHOLE), act=Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("int4", (1, 32), scale_dtype="bfloat16", act=Spec("uint8", _ROW, zero_point="int")),
    Spec("int8", _ROW, act=Spec("int8", _TENSOR, static=True)),
    Spec("int8", _ROW, act=Spec("uint8", _TENSOR, zero_point="int", static=True)),
    Spec("f8e4m3", _ROW, act=Spec("f8e4m3", _TENSOR, static=True)),
    Spec("f8e4m3", _TENSOR, act=Spec("f8e5m2", _TENSOR, static=True)),
    Spec(
        "int8", _ROW, act=Spec("f4e2m1", (1, 16), scale_dtype=Spec("f8e4m3", _TENSOR, static=True))
    ),
)


@dataclass(frozen=True)
class KernelCase:
    """A quantized tensor, and the dtype of the dense ones beside it."""

    spec: Spec
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{shape}-{self.spec}-{self.dtype}-{self.device}".replace("torch.", "")


class OpTrial:
    """How an op is tried; defaults of the attributes of `KernelSuite`, which says what they are."""

    specs: Sequence[Spec] = KERNEL_SPECS
    shapes: Sequence[tuple[int, ...]] = ((16, 64), (33, 330))
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    #: what differs between the calls of one case; of each rank some of few rows, which is all that some take
    batches: Sequence[Any] = (
        *((m,) for m in (0, 1, 2, 3, 5, 17, 64)),
        *((), (1, 3), (2, 3), (1, 1, 2), (2, 3, 5)),
    )

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        """The specs that the op is tried with for a tensor of this shape in a layout."""
        found = {
            (spec.dtype, spec.scale_dtype, spec.zero_point, spec.act): replace(
                spec, layout=layout.name
            )
            for spec in reversed(specs)
            if holds(layout, shape, spec)
        }
        return list(reversed(found.values()))

    def call(self, op: str, case: KernelCase, batch: Any) -> Call | None:
        """What the kernel is asked to accept; None where the op has no such call."""
        x_shape = (*batch, case.shape[-1])
        return Call(op, case.spec, case.shape, x_shape, case.dtype, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Arguments of the kernel, and the result to compare with."""
        raise NotImplementedError

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        """Assert that a result has the right shape, dtype and NaN, is contiguous, and near enough in norm."""
        shape, dtype = tuple(actual.shape), actual.dtype
        assert (shape, dtype) == (tuple(expected.shape), self.out_dtype(case)), (
            f"the result is {dtype} {shape}, expected {self.out_dtype(case)} {tuple(expected.shape)}"
        )
        assert actual.is_contiguous(), f"the result {shape} has strides {actual.stride()}"
        actual, expected = actual.double(), expected.double()
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), (
            f"the result {shape} has {int(actual.isnan().sum())} NaN, the product has {int(nan.sum())}"
        )
        error = (actual - expected).masked_fill(nan, 0.0).norm()
        norm = expected.masked_fill(nan, 0.0).norm()
        assert float(error) <= bound * float(norm), (
            f"relative error {float(error / norm):.2e} > {bound:.0e}, result {shape}"
        )

    def same(self, a: Any, b: Any) -> bool:
        """Whether two results have the same bits."""
        return same_bits(a, b)

    def out_dtype(self, case: KernelCase) -> torch.dtype:
        """Of the result."""
        return case.dtype

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The same arguments with dense ones that are not contiguous."""
        for variant in strided_variants(args[0]):
            yield (variant, *args[1:])


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
            # a product with zeros that are not stored need not look at what they are multiplied by
            x[1, k // 2 if w.sparsity is None else slice(None)] = torch.nan
        bias = gaussian((n,), seed=99, device=case.device).to(case.dtype)
        product = F.linear(activations(x, w), dense)
        yield (x, w, bias), product + bias.double()
        yield (x, w, None), product


class _Embedding(OpTrial):
    dtypes = (torch.float32,)

    def call(self, op: str, case: KernelCase, batch: Any) -> Call | None:
        return Call(op, case.spec, case.shape, batch, torch.int64, case.device)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        w = quantized(gaussian(case.shape, device=case.device).to(case.dtype), case.spec)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, case.shape[0], batch, generator=generator).to(case.device)
        yield (ids, w), F.embedding(ids, w.dequantize()).double()


def _cast_product(a: Tensor, b: Tensor, spec: Spec) -> Tensor:
    """``a @ b.T`` (float64) of the values that both operands are cast to."""
    assert spec.act is not None
    casts = fake_quantize(a.float(), spec.act), fake_quantize(b.float(), spec)
    return casts[0].double() @ casts[1].double().t()


class _Mm(OpTrial):
    def call(self, op: str, case: KernelCase, batch: Any) -> Call | None:
        # dense operands have no parts to keep a static scale in
        if len(batch) != 1 or case.spec.act is None or case.spec.act.is_static:
            return None
        return super().call(op, case, batch)

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        b = gaussian(case.shape, device=case.device).to(case.dtype)
        a = gaussian((*batch, case.shape[1]), seed=seed, device=case.device).to(case.dtype)
        expected = _cast_product(a, b, case.spec)
        yield (a, b, case.spec), expected
        yield (a, quantize_tensor(b, replace(case.spec, act=None)), case.spec), expected


class _GroupedLinear(OpTrial):
    """A batch is the number of rows of each expert and of those behind, or of all of them alike."""

    # one scale for all activations is one for each expert's
    specs = tuple(
        spec
        for spec in KERNEL_SPECS
        if spec.act is None or not (spec.act.is_static or spec.act.block == _TENSOR)
    )
    shapes = ((4, 16, 64), (3, 33, 70))
    batches = ((0,), (1,), (5,), (1, 0, 6, 2), (3, 17, 0, 0), (0, 0, 0, 4))

    def call(self, op: str, case: KernelCase, batch: Any) -> Call | None:
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
            torch.cat([_cast_product(*pair, spec) for pair in parts]),
            (0, 0, 0, total - sum(rows)),
        )
        if alike:
            yield (a.view(experts, *batch, k), b, None, spec), expected.view(experts, *batch, n)
            return
        offs = torch.tensor(rows, device=case.device).cumsum(0).to(torch.int32)
        yield (a, b, offs, spec), expected
        cut, other = a.t(), draw(n, total)
        share = [
            _cast_product(rows_of_a, rows_of_b, spec)
            for rows_of_a, rows_of_b in zip(
                other[:, : sum(rows)].split(rows, 1),
                cut[:, : sum(rows)].split(rows, 1),
                strict=True,
            )
        ]
        yield (other, cut, offs, spec), torch.stack(share)


def strided_variants(x: Tensor) -> Iterator[Tensor]:
    """The values of a plain tensor in memory that is not contiguous."""
    yield x.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
    if x.dim():
        # rows of a wider matrix; a single one even counts as contiguous, whatever its stride says
        yield torch.cat([x, x[..., :6]], -1)[..., : x.shape[-1]]
    if x.dim() == 2:
        yield x.t().contiguous().t()


PRODUCTS: dict[str, OpTrial] = {
    "linear": _Linear(),
    "embedding": _Embedding(),
    "mm": _Mm(),
    "grouped_linear": _GroupedLinear(),
    "grouped_mm": _GroupedMm(),
}

"""Trials of the ops of ao-core between dense values and codes, which must give the reference's bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Layout
from ao_core.numerics import choose_qparams, error_sums
from ao_core.records import Call, OpCall
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor import QTensor
from ao_core.tensor.codec import decode_reference
from ao_core.tensor.encoding import encode_reference
from ao_core.tensor.scaled import quantize_scaled_reference
from ao_core.testing.base import as_bytes, gaussian
from ao_core.testing.oracles import codes_from
from ao_core.testing.samples import SHAPES, SPECS, held_codes, holds, quantized
from ao_core.testing.trials import KernelCase, OpTrial, strided_variants

__all__ = [
    "CODEC_SPECS",
    "DEQUANTIZE",
    "ERROR_SUMS",
    "FAKE_QUANTIZE",
    "QUANTIZE",
    "QUANTIZE_BOTH",
    "QUANTIZE_SCALED",
    "RMS_NORM",
    "SILU_MUL",
    "contents",
    "same_values",
]

#: `SPECS`, and more of every kind of number, scale and zero point
CODEC_SPECS: tuple[Spec, ...] = (
    *SPECS,
    Spec("int1", (1, 32)),
    Spec("int2", (1, 24), scale_dtype="float16"),
    Spec("int5", (1, WHOLE), scale_dtype="e8m0"),
    Spec("ternary", (1, 32), scale_dtype="bfloat16"),
    Spec("uint8", (1, WHOLE), zero_point="int"),
    Spec("uint7", (2, 16), scale_dtype="e8m0", zero_point="int"),
    Spec("uint2", (1, 32), scale_dtype="e4m3", zero_point="float"),
    Spec("int4", (1, 32), scale_dtype="float16", zero_point="int"),
    Spec("f8e5m2", (1, WHOLE), scale_dtype="bfloat16"),
    Spec("f8e4m3", (1, 32), scale_dtype="e8m0", options=(("mx_mode", "rceil"),)),
    Spec("f6e3m2", (1, 32), scale_dtype="e8m0", options=(("mx_mode", "even"),)),
    Spec("f6e2m3", (1, 32), scale_dtype="e8m0", options=(("mx_mode", "ceil"),)),
    Spec("f4e2m1", (1, 16), scale_dtype="e4m3"),
    Spec("f4e2m1", (1, 32), scale_dtype="bfloat16", zero_point="float"),
    Spec("f4e2m1", (1, 16), scale_dtype=Spec("f8e4m3", (WHOLE, WHOLE))),
    Spec("nf4", (1, 64), zero_point="float"),
    Spec("uint4", (256,), zero_point="int"),
    Spec("f8e5m2", (128,), scale_dtype="e8m0"),
)
#: what dense values look like; see `contents`
KINDS = ("gaussian", "ties", "range", "not finite")


def contents(
    kind: str, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> Tensor:
    """Dense values that are hard to encode.

    - "ties": halves of steps, in blocks whose range is that of the format, so that a scale is 1
    - "range": powers of two over all of the dtype's exponents, and blocks of zeros of both signs
    - "not finite": Gaussian, with infinities and NaN among them
    """
    x = gaussian(shape, seed=seed)
    flat = x.view(-1)
    places = torch.arange(flat.numel())
    if kind == "ties":
        fmt = registry.dtypes.get(spec.dtype)
        # a dense format has no scale, so any range is that of the format
        low, high, quant_max = (
            (-8.0, 8.0, 8.0) if fmt.kind == "dense" else (fmt.min, fmt.max, fmt.quant_max)
        )
        flat.copy_((flat * max(high, 1.0)).round() / 2)
        flat.clamp_(low / 2, high / 2)
        flat[places % 8 == 0] = quant_max if spec.zero_point == "none" else high
        flat[places % 8 == 4] = low
    elif kind == "range":
        tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
        lowest = int(torch.tensor(tiny).log2()) - 24
        highest = int(torch.tensor(huge).double().log2()) - 1
        exponents = torch.linspace(lowest, highest, 41).round()[(places // 4 * 7 + seed) % 41]
        flat.copy_((flat.double() * torch.exp2(exponents.double())).clamp(-huge, huge))
        flat.mul_((places // 16 % 5 != 0).float())  # zeros, some of them negative
    elif kind == "not finite":
        bad = torch.tensor([torch.inf, -torch.inf, torch.nan])
        chosen = places % 23 == 7
        flat[chosen] = bad[(places[chosen] // 23) % 3]
    return x.to(dtype)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors have equal shape, dtype and bytes, but for the bits of a NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    a, b = a.contiguous(), b.contiguous()
    nan = a.float().isnan()
    if not torch.equal(nan, b.float().isnan()):
        return False
    width, number = a.dtype.itemsize, nan.reshape(-1, 1).logical_not()
    return torch.equal(as_bytes(a).view(-1, width) * number, as_bytes(b).view(-1, width) * number)


class _Codec(OpTrial):
    """A batch is one of `KINDS`."""

    specs = CODEC_SPECS
    shapes = SHAPES
    batches: Sequence[Any] = KINDS

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        return [spec.in_layout(layout.name) for spec in specs if holds(layout, shape, spec)]

    def call(self, op: str, case: KernelCase, batch: Any) -> OpCall | None:
        return Call(op, case.spec, case.shape, case.shape, case.dtype, case.device)


class _Quantize(_Codec):
    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        return super().fitting(layout, shape, specs) if layout.canonical else ()

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        x = contents(batch, case.spec, case.shape, case.dtype, seed).to(case.device)
        yield (x, case.spec), encode_reference(x, case.spec)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        assert list(actual) == list(expected), f"parts {list(actual)}, not {list(expected)}"
        tensor, other = (QTensor(p, case.spec, case.shape, case.dtype) for p in (actual, expected))
        leaves, others = dict(tensor.leaves()), dict(other.leaves())
        assert list(leaves) == list(others)
        # which NaN a scale becomes differs between the ways in which torch computes it, and so does
        # the sign of codes that are divided by it
        values = [
            decode_reference(p, case.spec, case.shape, torch.float32) for p in (actual, expected)
        ]
        assert same_values(*values)
        without_nan = not values[1].isnan().any()
        for name, leaf in leaves.items():
            assert leaf.is_contiguous(), f"part {name!r} is not contiguous"
            if without_nan or name != "qdata":
                assert same_values(leaf, others[name]), f"part {name!r} differs from the reference"

    def same(self, a: Any, b: Any) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a if a[name].dtype == torch.uint8)


class _QuantizeScaled(_Quantize):
    """Scales and zero points are those that `choose_qparams` gives."""

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        scaled = [s for s in specs if registry.dtypes.get(s.dtype).kind in ("int", "float", "lut")]
        return [s for s in super().fitting(layout, shape, scaled) if isinstance(s.scale_dtype, str)]

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        spec, fmt = case.spec, registry.dtypes.get(case.spec.dtype)
        if spec.zero_point == "offset":
            return
        x = contents(batch, spec, case.shape, case.dtype, seed).to(case.device)
        dense = x.reshape(registry.layouts.get(spec.layout).blocked_shape(case.shape))
        qparams = choose_qparams(dense, fmt, spec.block, spec.zero_point, spec.chosen_scale_dtype)
        yield (x, *qparams, spec), quantize_scaled_reference(x, *qparams, spec)


class _QuantizeBoth(_Quantize):
    """Of a matrix and its transpose; the rows of the latter's codes may be padded."""

    batches = ("gaussian", "not finite")

    def fitting(
        self, layout: Layout, shape: tuple[int, ...], specs: Sequence[Spec]
    ) -> Sequence[Spec]:
        if len(shape) != 2:
            return ()
        turned = super().fitting(layout, shape[::-1], specs)
        return [spec for spec in super().fitting(layout, shape, specs) if spec in turned]

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for args, expected in super().samples(case, batch, seed):
            yield args, (expected, encode_reference(args[0].t(), case.spec))

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        for parts, others, shape in zip(actual, expected, (1, -1), strict=True):
            turned = replace(case, shape=case.shape[::shape])
            whole = {name: part.contiguous() for name, part in parts.items()}
            super().check(whole, others, turned, bound)

    def same(self, a: Any, b: Any) -> bool:
        return all(super(_QuantizeBoth, self).same(*pair) for pair in zip(a, b, strict=True))


class _Produce(_Quantize):
    """Activations that are computed first, against float64: few codes beside the middle of two differ."""

    specs = (
        Spec("int8", (1, WHOLE)),
        Spec("uint8", (1, WHOLE), zero_point="int"),
        Spec("f8e4m3", (1, WHOLE)),
        Spec("f8e5m2", (1, 128)),
    )
    batches = ("gaussian",)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        values = [
            decode_reference(parts, case.spec, case.shape, torch.float64)
            for parts in (actual, expected)
        ]
        assert (values[0] - values[1]).norm() <= 5e-3 * values[1].norm()


class _RMSNorm(_Produce):
    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        x = (3 * gaussian(case.shape, seed=seed, device=case.device)).to(case.dtype)
        weight = gaussian(case.shape[-1:], seed=98, device=case.device).to(case.dtype)
        root = (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt()
        for factor in (weight, None):
            dense = x.double() / root * (1 if factor is None else factor.double())
            yield (x, factor, 0.1, case.spec), encode_reference(dense.to(case.dtype), case.spec)


class _SiLUMul(_Produce):
    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        gate, up = (
            (3 * gaussian(case.shape, seed=place, device=case.device)).to(case.dtype)
            for place in (seed, 97)
        )
        dense = gate.double() * torch.sigmoid(gate.double()) * up.double()
        yield (gate, up, case.spec), encode_reference(dense.to(case.dtype), case.spec)


class _Dequantize(_Codec):
    """Besides what `quantize` gives, codes of every bit pattern beside scales of every size."""

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        layout, fmt = registry.layouts.get(case.spec.layout), registry.dtypes.get(case.spec.dtype)
        holder = registry.layouts.get(layout.canonical_of(case.spec, fmt))
        spec = case.spec.in_layout(holder.name)
        x = contents(batch, spec, case.shape, case.dtype, seed).to(case.device)
        parts = encode_reference(x, spec)
        tried = [parts]
        if holder.affine:
            codes = torch.arange(x.numel(), device=case.device).reshape(
                holder.blocked_shape(case.shape)
            )
            codes = codes_from(codes * 37 % fmt.codes, fmt)
            qparams = parts.get("scale"), parts.get("zero_point")
            codes = held_codes(holder, codes, *qparams, spec)
            tried.append(holder.pack(codes, *qparams, spec, fmt))
        for canonical in tried:
            expected = decode_reference(canonical, spec, case.shape, case.dtype)
            stored = canonical
            if not layout.canonical:
                stored = layout.from_canonical(canonical, case.spec, case.shape, fmt)
            yield (stored, case.spec, case.shape, case.dtype), expected

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        assert (actual.shape, actual.dtype) == (expected.shape, case.dtype)
        assert actual.is_contiguous()
        assert same_values(actual, expected), "the values differ from the reference"

    def same(self, a: Any, b: Any) -> bool:
        return same_values(a, b)

    def strided(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        parts = args[0]
        yield ({name: _strided_part(part) for name, part in parts.items()}, *args[1:])


class _FakeQuantize(_Quantize):
    batches = ("range", "not finite")

    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for args, parts in super().samples(case, batch, seed):
            yield args, decode_reference(parts, case.spec, case.shape, case.dtype)

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        # a matrix that lies in memory column by column may be rounded as it lies
        assert actual.is_contiguous() or actual.t().is_contiguous()
        assert same_values(actual, expected), "the values differ from the reference"

    def same(self, a: Any, b: Any) -> bool:
        return same_values(a, b)


class _ErrorSums(_Codec):
    def samples(
        self, case: KernelCase, batch: Any, seed: int
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        x = contents(batch, case.spec, case.shape, case.dtype, seed).to(case.device)
        finite = contents("gaussian", case.spec, case.shape, case.dtype, seed).to(case.device)
        try:
            w = quantized(finite if batch == "not finite" else x, case.spec)
        except UnsupportedOp:
            return  # the layout is made on other devices only
        for step in (1, 3):
            yield (x, w, step), error_sums(x[::step], w.dequantize()[::step])

    def check(self, actual: Any, expected: Any, case: KernelCase, bound: float) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0.0, equal_nan=True)


def _strided_part(part: Tensor) -> Tensor:
    return part if isinstance(part, QTensor) else next(strided_variants(part))


QUANTIZE_SCALED = _QuantizeScaled()
QUANTIZE_BOTH = _QuantizeBoth()
FAKE_QUANTIZE = _FakeQuantize()
QUANTIZE = _Quantize()
RMS_NORM = _RMSNorm()
SILU_MUL = _SiLUMul()
DEQUANTIZE = _Dequantize()
ERROR_SUMS = _ErrorSums()

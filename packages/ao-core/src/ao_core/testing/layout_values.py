"""Part of `LayoutSuite`: packing, unpacking, copies and arithmetic in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Layout
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor import QTensor, quantize_tensor, to_layout
from ao_core.tensor.codec import unpack_parts
from ao_core.testing.base import as_bytes, gaussian, same_bits
from ao_core.testing.samples import Sample, held_codes, holds, quantized

__all__ = ["LayoutValues", "same_parts"]


#: aligned and ragged rows, wider than any block
WIDE_SHAPES = ((16, 64), (16, 1024), (5, 1131))


def same_parts(a: QTensor, b: QTensor) -> bool:
    """Whether two quantized tensors have the same parts, bit for bit."""
    left, right = dict(a.leaves()), dict(b.leaves())
    return left.keys() == right.keys() and all(same_bits(left[n], right[n]) for n in left)


def _same_sizes(a: QTensor, b: QTensor) -> bool:
    return [leaf.shape for _, leaf in a.leaves()] == [leaf.shape for _, leaf in b.leaves()]


def memory_of(q: QTensor) -> list[int]:
    """Addresses of the parts."""
    return [leaf.data_ptr() for _, leaf in q.leaves()]


class LayoutValues:
    """What does not look at dimensions."""

    layout: str
    record: Layout
    specs: Sequence[Spec]

    # -- parts -----------------------------------------------------------------------------------

    def test_pack_unpack(self, any_sample: Sample) -> None:
        """Every code survives packing, unpacking and conversion, whatever its neighbours."""
        self._check_packing(any_sample)

    def test_every_width_of_code(self) -> None:
        """Likewise integers of 1 to 8 bits, and all formats, in rows far wider than those of other tests."""
        integers = [
            Spec(f"{sign}int{bits}", block, "bfloat16", zero_point="int" if sign else "none")
            for bits in range(1, 9)
            for sign in ("", "u")
            for block in ((1, 32), (32,))
        ]
        for spec in (*integers, *self.specs, *self.record.examples):
            for shape in WIDE_SHAPES:
                if holds(self.record, shape, spec):
                    self._check_packing(Sample(spec.in_layout(self.layout), shape))

    def _check_packing(self, sample: Sample) -> None:
        holder = self._canonical(sample.spec)
        if not holder.affine:
            self._check_encode_again(sample)
            return
        fmt, spec = registry.dtypes.get(sample.spec.dtype), sample.spec
        q = sample.quantized()
        _, scale, zero_point = unpack_parts(q.parts, spec, sample.shape)
        shape = holder.blocked_shape(sample.shape)
        canonical = spec.in_layout(holder.name)
        if fmt.kind == "dense":
            codes = fmt.encode(gaussian(shape, seed=1))
        else:
            generator = torch.Generator().manual_seed(1)
            codes = torch.randint(0, fmt.codes, shape, generator=generator).to(torch.uint8)
        codes = held_codes(holder, codes, scale, zero_point, canonical)
        held = holder.unpack(q.canonical().parts, canonical, sample.shape, fmt)
        parts = holder.pack(codes, held[1], held[2], canonical, fmt)
        parts = self.record.from_canonical(parts, spec, sample.shape, fmt)
        again, scale_again, zero_again = unpack_parts(parts, spec, sample.shape)
        assert same_bits(again, codes), f"codes of {sample} did not survive{_lost(codes, again)}"
        for one, other in ((scale, scale_again), (zero_point, zero_again)):
            assert (one is None) == (other is None)
            assert one is None or same_bits(one, other)  # type: ignore[arg-type]

    def _check_encode_again(self, sample: Sample) -> None:
        """Where parts hold more than codes: what the number format keeps of its own values is kept."""
        values = sample.quantized().dequantize(torch.float32)
        lost = (quantized(values, sample.spec).dequantize(torch.float32) - values).norm()
        plain = quantized(values, sample.spec.in_layout("plain")).dequantize(torch.float32)
        bound = (plain.reshape(values.shape) - values).norm()
        assert float(lost) <= 1.5 * float(bound) + 1e-30, (
            f"layout {self.layout!r}: encode(decode(parts)) is off by {float(lost):.3g}, plain codes of "
            f"{sample.spec.dtype} by {float(bound):.3g}; encode and decode must know of every part"
        )

    def _canonical(self, spec: Spec) -> Layout:
        fmt = registry.dtypes.get(spec.dtype)
        return registry.layouts.get(self.record.canonical_of(spec, fmt))

    def test_canonical_and_back(self, any_sample: Sample) -> None:
        """To the canonical layout and back: the same values, the same bits."""
        q = any_sample.quantized()
        canonical = q.canonical()
        assert canonical.layout_record.canonical
        assert torch.equal(canonical.dequantize(), q.dequantize())
        back = to_layout(canonical, self.layout)
        assert back.spec == q.spec
        assert same_parts(back, q)

    def test_same_values_as_in_plain(self, any_sample: Sample) -> None:
        """A layout arranges: it does not change the value that each element it holds is stored as.

        Where the parts hold more than codes, the values are no further from the dense ones.
        """
        q, held = any_sample.quantized(), self._held(any_sample)
        plain = quantized(held, any_sample.spec.in_layout("plain")).dequantize()
        if self._canonical(any_sample.spec).affine:
            assert torch.equal(q.dequantize(), plain.reshape(any_sample.shape))
            return
        errors = [(values.reshape(held.shape) - held).norm() for values in (q.dequantize(), plain)]
        assert float(errors[0]) <= 1.1 * float(errors[1])

    def _held(self, sample: Sample) -> Tensor:
        """The dense values of a sample that the layout can hold, of the blocked shape."""
        layout = self._canonical(sample.spec)
        flat = sample.dense().reshape(layout.blocked_shape(sample.shape))
        return layout.sparsify(flat, sample.spec)

    def test_projects_once(self, sample: Sample) -> None:
        """What a layout holds, it holds: projecting again, or dense values that it gave, changes no bit."""
        held = self._held(sample)
        assert same_bits(self._canonical(sample.spec).sparsify(held, sample.spec), held)
        kept = held.view(torch.int32) == sample.dense().reshape(held.shape).view(torch.int32)
        assert not held[~kept].view(torch.int32).any()

    def test_geometry_describes_the_parts(self, any_sample: Sample) -> None:
        """Where a geometry is declared, it gives the size of every part along every dimension."""
        q = any_sample.quantized()
        fmt = registry.dtypes.get(any_sample.spec.dtype)
        for name, axes in self._declared(any_sample.spec, any_sample.shape).items():
            if name not in q.part_names:
                continue
            part = getattr(q, name)
            assert len(axes) <= part.dim()
            for dim, axis in enumerate(axes):
                if axis is None:
                    assert part.shape[dim] <= 1 or part.dim() < q.dim()
                else:
                    needed = -(-any_sample.shape[dim] // axis.values) * axis.entries
                    assert part.shape[dim] <= needed, (name, dim, fmt.name)
                    assert part.shape[dim] > needed - axis.entries or needed == 0

    def _declared(self, spec: Spec, shape: tuple[int, ...]) -> dict:  # type: ignore[type-arg]
        try:
            return self.record.geometry(spec, shape, registry.dtypes.get(spec.dtype))
        except UnsupportedOp:
            return {}  # `LayoutCuts` checks that every cut is refused then

    # -- copies ----------------------------------------------------------------------------------

    def test_aliases_share_memory(self, sample: Sample) -> None:
        """Detach and alias: another tensor over the same parts."""
        q = sample.quantized()
        for other in (q.detach(), torch.ops.aten.alias(q)):
            assert isinstance(other, QTensor)
            assert other is not q
            assert memory_of(other) == memory_of(q)
            assert not other.requires_grad

    def test_copies_have_memory_of_their_own(self, sample: Sample) -> None:
        """Clone of all parts; contiguous is the tensor itself or one like it."""
        q = sample.quantized()
        for other in (q.contiguous(), q.clone()):
            assert isinstance(other, QTensor)
            assert (other.shape, other.dtype, other.spec) == (q.shape, q.dtype, q.spec)
            assert same_parts(other, q)
        copied: Any = q.clone()
        assert not q.numel() or not set(memory_of(copied)) & set(memory_of(q))

    def test_to_changes_the_logical_dtype(self, sample: Sample) -> None:
        """The values are rounded to it once; codes and scales stay as they are."""
        q = sample.quantized()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            other = q.to(dtype)
            assert isinstance(other, QTensor)
            assert (other.dtype, other.shape) == (dtype, q.shape)
            assert same_parts(other.canonical(), q.canonical())
            assert torch.equal(other.dequantize(), q.dequantize(torch.float32).to(dtype))
            assert torch.equal(other.to(q.dtype).dequantize(), q.dequantize())

    def test_half_and_other_shorthands(self, sample: Sample) -> None:
        """`.half()`, `.bfloat16()`, `.float()`, `.cpu()` and `.type(…)`."""
        q = sample.quantized()
        assert torch.equal(q.half().dequantize(), q.dequantize().half())
        assert torch.equal(q.bfloat16().dequantize(), q.dequantize().bfloat16())
        assert torch.equal(q.half().float().dequantize(), q.dequantize())
        assert torch.equal(q.cpu().dequantize(), q.dequantize())
        assert q.type(torch.float16).dtype == torch.float16

    def test_to_meta(self, sample: Sample) -> None:
        """The meta device: no memory, the canonical format."""
        q = sample.quantized().to("meta")
        assert isinstance(q, QTensor)
        assert q.device.type == "meta"
        assert tuple(q.shape) == sample.shape
        assert all(leaf.device.type == "meta" for _, leaf in q.leaves())

    def test_empty_like_and_zeros_like(self, sample: Sample) -> None:
        """Same shape and format, memory of its own."""
        q = sample.quantized()
        for other in (torch.empty_like(q), torch.zeros_like(q)):
            assert isinstance(other, QTensor)
            assert (other.shape, other.dtype, other.spec) == (q.shape, q.dtype, q.spec)
            sizes = [leaf.shape for _, leaf in other.leaves()]
            assert sizes == [leaf.shape for _, leaf in q.leaves()]
            assert not q.numel() or not set(memory_of(other)) & set(memory_of(q))
        assert torch.empty_like(q, dtype=torch.bfloat16).dtype == torch.bfloat16

    def test_pinned_memory(self, sample: Sample) -> None:
        """`is_pinned` and `pin_memory` do what they do to a dense tensor, on this machine."""
        q, dense = sample.quantized(), sample.dense()
        assert q.is_pinned() is False
        if torch.cuda.is_available():
            assert q.pin_memory().is_pinned()
            assert torch.equal(q.pin_memory().dequantize(), q.dequantize())
            return
        with pytest.raises(RuntimeError) as expected:
            dense.pin_memory()
        with pytest.raises(type(expected.value)):
            q.pin_memory()

    # -- comparison ------------------------------------------------------------------------------

    def test_equal(self, sample: Sample) -> None:
        """torch.equal compares values: with a copy, with dense ones, with others."""
        q = sample.quantized()
        assert torch.equal(q, q.clone())
        assert torch.equal(q, q.dequantize())
        assert torch.equal(q.dequantize(), q)
        if q.numel() > 1:
            other = sample.quantized(seed=5)
            assert not torch.equal(q, other)
            assert not torch.equal(q, other.dequantize())

    # -- in place --------------------------------------------------------------------------------

    def test_copy_from_dense_quantizes(self, sample: Sample) -> None:
        """`copy_` of dense values: what quantizing them gives, in the memory that was there."""
        for dtype in (torch.float32, torch.bfloat16):
            q, new = sample.quantized(), sample.dense(seed=7).to(dtype)
            memory = memory_of(q)
            assert q.copy_(new) is q
            assert memory_of(q) == memory
            assert same_parts(q, quantized(new.float(), sample.spec))

    def test_copy_between_quantized(self, sample: Sample) -> None:
        """`copy_` of the same format copies bits; of another one quantizes its values."""
        q, other = sample.quantized(), sample.quantized(seed=7)
        memory = memory_of(q)
        q.copy_(other)
        assert memory_of(q) == memory
        assert same_parts(q, other)
        assert not q.numel() or memory_of(q) != memory_of(other)
        wide = Spec("int8", (1,), layout="plain")
        third = quantize_tensor(sample.dense(seed=8), wide)
        q.copy_(third)
        assert same_parts(q, quantized(third.dequantize(), sample.spec))
        dense = torch.empty(sample.shape)
        assert torch.equal(dense.copy_(q), q.dequantize())

    def test_arithmetic_in_place(self, sample: Sample) -> None:
        """Merging LoRA weights, optimizer steps: the result of the dense op, quantized again.

        Where that needs memory of another size, nothing is changed.
        """
        ops: list[Callable[[Tensor, Tensor], Tensor]] = [
            lambda t, o: t.add_(o),
            lambda t, o: t.add_(o, alpha=-0.5),
            lambda t, o: t.sub_(o),
            lambda t, o: t.lerp_(o, 0.25),
            lambda t, o: t.mul_(0.5),
            lambda t, o: t.zero_(),
        ]
        for op in ops:
            q, other = sample.quantized(), sample.dense(seed=3)
            expected = op(q.dequantize(), other)
            new, memory = quantized(expected, sample.spec), memory_of(q)
            if not _same_sizes(q, new):
                with pytest.raises(UnsupportedOp, match=self.layout):
                    op(q, other)
                assert same_parts(q, sample.quantized())
                continue
            assert op(q, other) is q
            assert memory_of(q) == memory
            assert same_parts(q, new)

    def test_arithmetic_in_place_with_quantized(self, sample: Sample) -> None:
        """The same with a quantized operand, and into a dense tensor."""
        for op, more in (("add_", ()), ("sub_", ()), ("lerp_", (0.25,))):
            q, other = sample.quantized(), sample.quantized(seed=3)
            expected = getattr(q.dequantize(), op)(other.dequantize(), *more)
            dense = getattr(q.dequantize(), op)(other, *more)
            assert torch.equal(dense, expected)
            getattr(q, op)(other, *more)
            assert same_parts(q, quantized(expected, sample.spec))

    def test_parts_hold_no_surprise(self, sample: Sample) -> None:
        """The memory is that of the codes and scales: no hidden copy of the dense values."""
        q = sample.quantized()
        fmt = registry.dtypes.get(sample.spec.dtype)
        codes = sum(as_bytes(leaf).numel() for name, leaf in q.leaves() if name == "qdata")
        assert codes * 8 >= int(self._held(sample).count_nonzero()) * math.log2(fmt.codes)
        assert q.stored_bytes == sum(as_bytes(leaf).numel() for _, leaf in q.leaves())


def _lost(codes: Tensor, again: Tensor) -> str:
    """Which columns of a matrix came back with other codes."""
    if not codes.dim() or codes.shape != again.shape:
        return f": {tuple(codes.shape)} became {tuple(again.shape)}"
    columns = (codes != again).reshape(-1, codes.shape[-1]).any(0).nonzero().flatten().tolist()
    first, last = (columns[0], columns[-1]) if columns else (0, -1)
    return f": {len(columns)} of {codes.shape[-1]} columns differ, from {first} to {last}"

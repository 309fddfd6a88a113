"""Part of `LayoutSuite`: slicing, joining, gathering, views and shards."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.layouts import Layout
from ao_core.tensor import QTensor
from ao_core.testing.abilities import (
    can_cut,
    can_gather,
    can_join,
    can_narrow,
    can_resize,
    can_select,
    can_stack,
    layouts_of,
)
from ao_core.testing.samples import Sample

__all__ = ["LayoutCuts", "expect"]


def expect(
    declared: bool, q: QTensor, names: tuple[str, ...], op: Callable[..., Any], *args: Any
) -> Any:
    """Check `op(q, *args)`: the dense result where declared, `UnsupportedOp` where not.

    Args:
        declared: whether the layout says that it can.
        q: the tensor.
        names: names of the op, one of which must stand in the error beside the layout's.
        op: works on quantized and dense tensors alike.
        args: its further arguments.
    """
    if not declared:
        with pytest.raises(UnsupportedOp) as caught:
            op(q, *args)
        text = str(caught.value)
        assert any(name in text for name in names), f"the error does not name {names}: {text}"
        named = any(layout in text for layout in layouts_of(q))
        assert named, f"the error does not name the layout {q.spec.layout!r}: {text}"
        return None
    actual, expected = op(q, *args), op(q.dequantize(), *args)
    if isinstance(expected, Tensor):
        check_equal(actual, expected)
    else:
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            check_equal(one, other)
    return actual


def check_equal(actual: Any, expected: Tensor) -> None:
    """A quantized tensor whose values, shape and dtype are those of a dense one."""
    assert isinstance(actual, QTensor), f"the result is a {type(actual).__name__}"
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    values = actual.dequantize()
    assert values.shape == expected.shape
    assert torch.equal(values, expected)


def chunk_sizes(size: int, pieces: int) -> list[int]:
    """The sizes that torch.chunk gives."""
    step = max(-(-size // pieces), 1)
    return [min(step, size - start) for start in range(0, size, step)] or [0]


class LayoutCuts:
    """Everything that looks at dimensions."""

    record: Layout

    # -- cutting ---------------------------------------------------------------------------------

    def test_slice_and_narrow(self, sample: Sample) -> None:
        """Ranges along every dimension, aligned and not, empty and whole, from both ends."""
        q = sample.quantized()
        for dim, size in enumerate(sample.shape):
            for start, length in _ranges(size):
                declared = can_narrow(q, dim, start, length)
                expect(
                    declared,
                    q,
                    ("slice", "narrow"),
                    torch.narrow,
                    dim,
                    start,
                    length,
                )
                index = (slice(None),) * dim + (slice(start, start + length),)
                # to torch the whole range is not a slice at all
                expect(declared or length == size, q, ("slice",), getitem, index)
            ends = (slice(None),) * dim + (slice(-10_000, 10_000),)
            expect(can_narrow(q, dim, 0, size), q, ("slice",), getitem, ends)

    def test_slices_share_memory(self, weight: Sample) -> None:
        """A slice is a view: codes and scales written into it are those of the tensor."""
        q, other = weight.quantized(), weight.quantized()
        half = weight.shape[0] // 2
        if not can_cut(q, 0, [half, weight.shape[0] - half]):
            expect(False, q, ("slice",), lambda t: (t[:half], t[half:]))
            return
        if not self.record.canonical:
            check_equal(q[:half], q.dequantize()[:half])
            return
        for _, leaf in q.leaves():
            leaf.view(torch.uint8).zero_()
        q[:half].copy_(other[:half])
        q[half:].copy_(other[half:])
        check_equal(q, other.dequantize())

    def test_slice_with_a_step(self, weight: Sample) -> None:
        """Every other row keeps no block together."""
        expect(False, weight.quantized(), ("slice",), lambda t: t[::2])

    def test_split_and_chunk(self, sample: Sample) -> None:
        """Even and uneven pieces along every dimension."""
        q = sample.quantized()
        for dim, size in enumerate(sample.shape):
            for pieces in (2, 3):
                sizes = chunk_sizes(size, pieces)
                declared = can_cut(q, dim, sizes)
                expect(
                    declared,
                    q,
                    ("split", "chunk", "slice"),
                    torch.chunk,
                    pieces,
                    dim,
                )
            step = max(size // 3, 1)
            sizes = [min(step, size - start) for start in range(0, size, step)] or [0]
            expect(
                can_cut(q, dim, sizes),
                q,
                ("split", "slice"),
                torch.split,
                step,
                dim,
            )
            sizes = [size // 4, size - size // 4]
            expect(
                can_cut(q, dim, sizes),
                q,
                ("split", "slice"),
                torch.split,
                sizes,
                dim,
            )

    def test_select_and_unbind(self, sample: Sample) -> None:
        """One index along every dimension, and all of them."""
        q = sample.quantized()
        for dim, size in enumerate(sample.shape):
            declared = can_select(q, dim)
            for index in {0, size // 2, size - 1, -1} if size else ():
                expect(declared, q, ("select",), torch.select, dim, index)
            if size:
                expect(declared, q, ("select", "unbind"), torch.unbind, dim)
            with pytest.raises(IndexError):
                torch.select(q, dim, size)

    def test_index(self, sample: Sample) -> None:
        """Gathering rows with index_select keeps the format; advanced indexing gives dense values."""
        q = sample.quantized()
        rows = sample.shape[0]
        index = torch.tensor([rows - 1, 0, rows // 2, 0] if rows else [], dtype=torch.int64)
        expect(can_gather(q), q, ("index_select",), lambda t: torch.index_select(t, 0, index))
        if q.dim() > 1:
            expect(
                False,
                q,
                ("index_select",),
                lambda t: torch.index_select(t, 1, index.clamp(max=0)[:1]),
            )
        assert torch.equal(_values(q[index]), q.dequantize()[index])

    # -- joining ---------------------------------------------------------------------------------

    def test_cat(self, sample: Sample) -> None:
        """The pieces of a tensor, and a tensor with itself, along every dimension."""
        q = sample.quantized()
        for dim, size in enumerate(sample.shape):
            twice, dense = [q, q], [q.dequantize()] * 2
            declared = can_join(twice, dim)
            expect_join(declared, twice, dense, ("cat",), torch.cat, dim)
            sizes = chunk_sizes(size, 3)
            if can_cut(q, dim, sizes):
                pieces = list(torch.chunk(q, 3, dim))
                joined = torch.cat(pieces, dim)
                check_equal(joined, q.dequantize())

    def test_cat_of_other_formats(self, weight: Sample) -> None:
        """With a dense tensor the result is dense, as DDP needs it; other logical dtypes are refused."""
        q, dense = weight.quantized(), weight.dense()
        assert torch.equal(torch.cat([q, dense]), torch.cat([q.dequantize(), dense]))
        with pytest.raises(UnsupportedOp, match="cat"):
            torch.cat([q, weight.quantized().half()])

    def test_stack(self, sample: Sample) -> None:
        """Along a new leading dimension, as the experts of a layer; along others not."""
        pieces = [sample.quantized(seed=s) for s in range(3)]
        dense = [piece.dequantize() for piece in pieces]
        expect_join(can_stack(pieces[0]), pieces, dense, ("stack",), torch.stack)
        expect_join(False, pieces, dense, ("stack",), torch.stack, -1)

    # -- views -----------------------------------------------------------------------------------

    def test_transposes(self, sample: Sample) -> None:
        """t, transpose, permute, .T: every layout, without touching memory, and back."""
        q = sample.quantized()
        ndim = q.dim()
        assert_view = _assert_same_memory(q)
        if ndim <= 2:
            assert_view(expect(True, q, ("t",), lambda t: t.t()))
            check_equal(q.t().t(), q.dequantize())
        if ndim >= 2:
            for dims in ((0, 1), (0, -1), (-2, -1)):
                out = expect(True, q, ("transpose",), torch.transpose, *dims)
                assert_view(out)
                check_equal(out.transpose(*dims), q.dequantize())
                assert out.stride() == q.dequantize().transpose(*dims).stride() or 0 in q.shape
        order = [*range(1, ndim), 0]
        rolled = expect(True, q, ("permute",), lambda t: t.permute(order))
        assert_view(rolled)
        check_equal(rolled.permute([ndim - 1, *range(ndim - 1)]), q.dequantize())

    def test_cuts_of_a_transpose(self, weight: Sample) -> None:
        """Outward dimensions are those that ops count, also after transposing."""
        q: Any = weight.quantized().t()
        for dim, size in enumerate(q.shape):
            for start, length in _ranges(size):
                expect(
                    can_narrow(q, dim, start, length),
                    q,
                    ("slice", "narrow"),
                    torch.narrow,
                    dim,
                    start,
                    length,
                )
            expect(can_select(q, dim), q, ("select",), torch.select, dim, 0)
        dense = q.dequantize()
        new = weight.dense(seed=4).t()
        q.copy_(new)
        assert q.shape == dense.shape
        check_equal(q.t(), weight.quantized(seed=4).dequantize())

    def test_view(self, sample: Sample) -> None:
        """The own shape, flat, and back; other shapes would tear blocks apart."""
        q = sample.quantized()
        assert_view = _assert_same_memory(q)
        assert_view(expect(True, q, ("view",), lambda t: t.view(sample.shape)))
        flat = expect(True, q, ("view",), lambda t: t.view(-1))
        assert_view(flat)
        check_equal(flat.view(sample.shape), q.dequantize())
        check_equal(q.reshape(sample.shape), q.dequantize())
        if q.numel() > 1:
            expect(False, q, ("view",), lambda t: t.view(q.numel(), 1, 1))

    def test_as_strided(self, sample: Sample) -> None:
        """The own size and stride, which is what autograd and FSDP ask for; nothing else."""
        q = sample.quantized()
        _assert_same_memory(q)(
            expect(True, q, ("as_strided",), lambda t: t.as_strided(t.shape, t.stride()))
        )
        if q.numel() > 1:
            expect(False, q, ("as_strided",), lambda t: t.as_strided((1,), (1,)))

    def test_new_zeros(self, sample: Sample) -> None:
        """Another number of rows in the same format, all zero; other dimensionalities are refused."""
        q = sample.quantized()
        for rows in (sample.shape[0], 2 * sample.shape[0] + 1, 1, 0):
            size = (rows, *sample.shape[1:])
            if not can_resize(q, rows):
                expect(False, q, ("new_zeros",), Tensor.new_zeros, size)
                continue
            zeros = q.new_zeros(size)
            assert isinstance(zeros, QTensor)
            assert (tuple(zeros.shape), zeros.dtype) == (size, q.dtype)
            assert zeros.spec in (q.spec, q.canonical().spec)
            # 2**-127, the least scale there is without a zero, times the least code
            assert not (zeros.dequantize().abs() > 1e-30).any()
        expect(False, q, ("new_zeros",), lambda t: t.new_zeros((2,) * (q.dim() + 1)))

    # -- shards ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("world", [2, 3])
    def test_fsdp_shards(self, world: int, sample: Sample) -> None:
        """What FSDP2 does to a parameter on every rank: chunk, pad, copy, flatten, narrow.

        Rows are dealt unevenly where they do not divide. Where the layout cannot be cut there,
        the first step must say so.
        """
        q, dense = sample.quantized(), sample.quantized().dequantize()
        rows = sample.shape[0]
        if not can_cut(q, 0, chunk_sizes(rows, world)):
            expect(False, q, ("split", "chunk", "slice"), torch.chunk, world, 0)
            return
        chunks = torch.chunk(q, world, 0)
        for piece, expected in zip(chunks, torch.chunk(dense, world, 0), strict=True):
            padded = q.new_zeros(chunks[0].size())
            if piece.numel():
                padded.narrow(0, 0, piece.shape[0]).copy_(piece)
            flat = padded.view(-1)
            assert flat.shape == (chunks[0].numel(),)
            local = padded.narrow(0, 0, piece.shape[0])
            check_equal(local, expected)
            assert local.is_contiguous()

    def test_fsdp_rank_without_rows(self, weight: Sample) -> None:
        """With more ranks than rows, some hold an empty shard: `new_empty(0)`."""
        q = weight.quantized()
        if not can_cut(q, 0, (weight.shape[0], 0)):
            expect(False, q, ("new_zeros",), lambda t: t.new_empty((0, *weight.shape[1:])))
            return
        empty = q.new_empty((0, *weight.shape[1:]))
        assert empty.shape[0] == 0
        assert empty.dequantize().shape == (0, *weight.shape[1:])


def expect_join(
    declared: bool,
    pieces: list[QTensor],
    dense: list[Tensor],
    names: tuple[str, ...],
    op: Callable[..., Any],
    *args: Any,
) -> None:
    """`expect` for ops on several tensors."""
    both = {True: pieces, False: dense}
    expect(declared, pieces[0], names, lambda t: op(both[isinstance(t, QTensor)], *args))


def _ranges(size: int) -> list[tuple[int, int]]:
    """(start, length): whole, empty, halves, a middle, one element at the end."""
    half = size // 2
    found = [(0, size), (0, half), (half, size - half), (size // 4, half), (half, 0), (size, 0)]
    return list(dict.fromkeys([*found, (size - 1, 1)] if size else found))


def _values(t: Tensor) -> Tensor:
    return t.dequantize() if isinstance(t, QTensor) else t


def _assert_same_memory(q: QTensor) -> Callable[[QTensor], None]:
    memory = [leaf.data_ptr() for _, leaf in q.leaves()]

    def check(view: QTensor) -> None:
        assert [leaf.data_ptr() for _, leaf in view.leaves()] == memory

    return check

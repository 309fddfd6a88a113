"""What the matmuls on sparse tensor cores are given, and which calls they take, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import Kernel
from ao_core.ext.kernels import select
from ao_core.testing import KernelSuite
from ao_core.testing.base import gaussian, run
from ao_core.testing.registered import registered
from ao_sparsity import tile_mask
from ao_sparsity.masks import n_of_m_mask
from ao_sparsity.train.kernels import KERNELS, MaskedCall, semi_sparse_mm

(TENSOR_CORES,) = KERNELS


class TestTileMask(KernelSuite):
    kernel = "reference_tile_mask"


class TestSemiSparseMm(KernelSuite):
    kernel = "reference_semi_sparse_mm"


def first_of_four(weight):
    mask = torch.zeros_like(weight, dtype=torch.bool)
    mask[:, ::2] = True
    return mask


def along_rows_only(weight):
    return n_of_m_mask(weight.abs(), 2, 4)


def identity_tiles(weight):
    row, column = (torch.arange(size) for size in weight.shape)
    return (row[:, None] + column) % 2 == 0


def without_mask(a, b, mask, transposed):
    return a @ (b if transposed else b.t())


@pytest.mark.parametrize(
    ("op", "fn", "text"),
    [
        ("tile_mask", first_of_four, "more than two of four"),
        ("tile_mask", along_rows_only, "more than two of four"),
        ("tile_mask", identity_tiles, "another pattern keeps more"),
        ("semi_sparse_mm", without_mask, "relative error"),
    ],
)
def test_wrong_kernels_fail(op, fn, text):
    class Wrong(KernelSuite):
        records = (Kernel("wrong", op, "two_four", "cpu", fn, 0),)
        kernel = "wrong"

    with registered(*Wrong.records), pytest.raises(AssertionError, match=text):
        run(Wrong, "test_results")


@pytest.mark.parametrize("transposed", [False, True])
def test_operands_are_two_of_four(monkeypatch, transposed):
    """What is compressed is 2:4 along its rows, for both matmuls, and they are those of the reference."""
    seen = []

    def compressed(dense: torch.Tensor) -> torch.Tensor:
        assert dense.is_contiguous()
        seen.append(int((dense.unflatten(1, (-1, 4)) != 0).sum(-1).max()))
        return dense

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", compressed)
    weight = gaussian((48, 80), seed=1)
    a, mask = gaussian((5, 48 if transposed else 80), seed=2), tile_mask(weight)
    expected = semi_sparse_mm(a, weight, mask, transposed)
    torch.testing.assert_close(TENSOR_CORES.fn(a, weight, mask, transposed), expected)
    assert seen == [2]
    assert not torch.allclose(expected, a @ (weight if transposed else weight.t()))


@pytest.mark.parametrize(
    ("shape", "rows", "dtype", "reason"),
    [
        ((48, 80), 5, torch.bfloat16, None),
        ((48, 80), 5, torch.float16, None),
        ((48, 80), 5, torch.float32, "not torch.float32"),
        ((48, 72), 5, torch.bfloat16, "multiples of 16"),
        ((40, 80), 5, torch.bfloat16, "multiples of 16"),
        ((48, 80), 0, torch.bfloat16, "not empty"),
    ],
)
def test_refusals(shape, rows, dtype, reason):
    """What tensor cores refuse, with the reason, the reference takes."""
    call = MaskedCall("semi_sparse_mm", shape, (rows, shape[1]), dtype, "cuda")
    found = TENSOR_CORES.refuses(call)
    assert (found is None) if reason is None else (reason in found)
    assert select(replace(call, device="cpu")).name == "reference_semi_sparse_mm"

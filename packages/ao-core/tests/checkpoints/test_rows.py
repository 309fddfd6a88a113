"""Weights are quantized some rows at a time where that gives the same bits, and else at once."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, QTensor, Skip, Spec, quantize_tensor
from ao_core.checkpoints.rows import by_rows

#: format -> whether some rows at a time will do
SPECS = {
    Spec("int8", (1, WHOLE)): True,
    Spec("uint4", (1, 32), "bfloat16", zero_point="int", layout="packed"): True,
    Spec("int3", (1, 50), layout="packed"): True,
    Spec("f8e4m3", (128, 128)): True,
    Spec("nf4", (1, 64), Spec("f8e4m3", (1, WHOLE)), layout="packed"): True,
    Spec("nf4", (1, 64), Spec("f8e4m3", (WHOLE, WHOLE)), layout="packed"): False,
    Spec("int8", (WHOLE, WHOLE)): False,
    Spec("int8", (96, WHOLE)): False,  # blocks that 128 rows do not hold
    Spec("int8", (WHOLE, 1)): False,
    Spec("int4", (256,), layout="flat"): False,
}


def counting(spec):
    shapes = []

    def apply(x):
        if not x.is_meta:
            shapes.append(tuple(x.shape))
        return quantize_tensor(x, spec)

    return apply, shapes


def same(a, b):
    assert (a.spec, a.shape, a.dtype) == (b.spec, b.shape, b.dtype)
    for (name, x), (_, y) in zip(a.leaves(), b.leaves(), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
        assert x.is_contiguous()


@pytest.mark.parametrize("shape", [(300, 70), (3, 200, 70), (129, 9)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_same_bits(spec, shape):
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    apply, shapes = counting(spec)
    new = by_rows(dense, apply, elements=1000)
    same(new, quantize_tensor(dense, spec))
    if SPECS[spec]:
        assert len(shapes) > 1
        assert all(shape[-2] <= 128 for shape in shapes)
    elif len(dense.shape) == 2 or spec.layout != "flat":
        assert shapes[-1] == shape


def test_small_ones_and_other_ranks_at_once():
    apply, shapes = counting(Spec("int8", (1, WHOLE)))
    for shape in [(128, 70), (5000,), (2, 3, 40, 70)]:
        by_rows(torch.ones(shape), apply, elements=1000)
        assert shapes[-1] == shape
    assert len(shapes) == 3


def test_where_the_whole_would_be_refused_or_differ():
    dense = torch.randn(300, 64)
    row = Spec("int8", (1, WHOLE))

    def refuses(x):
        return Skip("too many rows") if x.shape[0] > 200 else quantize_tensor(x, row)

    assert by_rows(dense, refuses, elements=1) == Skip("too many rows")

    def differs(x):
        return quantize_tensor(x, row if x.shape[0] < 200 else Spec("int8", (1, 32)))

    assert by_rows(dense, differs, elements=1).spec.block == (1, 32)

    def by_values(x):
        spec = row if float(x.abs().max()) < 100 else Spec("uint8", (1, WHOLE), zero_point="int")
        return quantize_tensor(x, spec)

    dense[299, 0] = 200.0
    new = by_rows(dense, by_values, elements=1)
    assert isinstance(new, QTensor)
    assert new.spec.dtype == "uint8"

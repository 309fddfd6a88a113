"""What the products on sparse tensor cores are given, and which calls they take, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core.dispatch import select
from ao_core.records import Call
from ao_core.spec import Spec
from ao_core.testing.base import gaussian
from ao_sparsity import tile_mask
from ao_sparsity.train.kernels import KERNELS, semi_sparse_mm

(TENSOR_CORES,) = (kernel for kernel in KERNELS if kernel.device == "cuda")
REFERENCE = next(kernel for kernel in KERNELS if kernel.op == TENSOR_CORES.op)


@pytest.mark.parametrize("transposed", [False, True])
def test_operands_are_two_of_four(monkeypatch, transposed):
    """What is compressed is 2:4 along its rows, for both products, and they are those of the reference."""
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
    spec = Spec("bf16", (4, 4), "none", layout="two_four")
    call = Call("semi_sparse_mm", spec, shape, (rows, shape[1]), dtype, "cuda")
    found = TENSOR_CORES.refuses(call)
    assert (found is None) if reason is None else (reason in found)
    assert select(replace(call, device="cpu")) is REFERENCE

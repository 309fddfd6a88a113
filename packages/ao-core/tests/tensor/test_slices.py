"""Writing through a slice changes that slice, or is refused; it never changes the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.errors import UnsupportedOp
from ao_core.tensor import native

ROW = Spec("int8", (1, WHOLE))
TENSOR = Spec("f8e4m3", (WHOLE, WHOLE))
GROUP = Spec("int4", (1, 32), "bfloat16", layout="packed")


def _tensor(spec: Spec, dtype: torch.dtype = torch.float32) -> QTensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    return quantize_tensor(x.to(dtype), spec)


def _pieces(tensor: QTensor) -> dict[str, Tensor]:
    return {"rows": tensor[8:16], "columns": tensor[:, 32:], "one row": tensor[3]}


@pytest.mark.parametrize("name", ["rows", "one row"])
def test_rows_of_their_own_are_written(name: str) -> None:
    for spec in (ROW, GROUP):
        tensor = _tensor(spec)
        before = tensor.dequantize()
        piece = _pieces(tensor)[name]
        piece.zero_()
        after = tensor.dequantize()
        changed = (before != after).any(1)
        assert int(changed.sum()) == (8 if name == "rows" else 1)
        assert (piece.dequantize() == 0).all()


@pytest.mark.parametrize(
    ("spec", "name"), [(TENSOR, "rows"), (TENSOR, "one row"), (ROW, "columns"), (TENSOR, "columns")]
)
def test_a_shared_scale_is_not_overwritten(spec: Spec, name: str) -> None:
    tensor = _tensor(spec)
    before = tensor.clone()
    piece = _pieces(tensor)[name]
    for write in (
        lambda t: t.zero_(),
        lambda t: t.copy_(torch.ones(t.shape)),
        lambda t: t.mul_(2.0),
    ):
        with pytest.raises(UnsupportedOp, match="'scale' is shared"):
            write(piece)
    assert torch.equal(tensor, before)
    # codes alone may change, and a copy is free
    piece.copy_(piece.clone())
    assert torch.equal(tensor, before)
    assert (piece.clone().zero_().dequantize() == 0).all()
    assert torch.equal(tensor, before)


def test_a_byte_shared_by_two_elements_is_not_overwritten() -> None:
    tensor = _tensor(GROUP)
    before = tensor.clone()
    with pytest.raises(UnsupportedOp, match="shared"):
        tensor[:, :33].zero_()
    with pytest.raises(UnsupportedOp, match="'qdata' is shared"):
        tensor[:, :33].copy_(before[:, :33].clone())
    assert torch.equal(tensor, before)


def test_a_slice_of_a_kernel_layout_is_a_copy_and_says_so() -> None:
    tensor = native(_tensor(GROUP, torch.bfloat16))
    assert tensor.spec.layout == "int4_cpu"
    before = tensor.dequantize()
    piece = tensor[:16]
    assert torch.equal(piece.dequantize(), before[:16])
    with pytest.raises(UnsupportedOp, match="copied from"):
        piece.zero_()
    assert torch.equal(tensor.dequantize(), before)


def test_shards_beyond_the_last_row_are_empty() -> None:
    tensor = _tensor(ROW)
    assert tensor.new_empty((0,)).shape == (0, 64)
    # what FSDP2 does to pad a shard
    for spec in (ROW, TENSOR, GROUP):
        tensor = _tensor(spec)
        padded = tensor.new_zeros((40, 64))
        padded.narrow(0, 0, 32).copy_(tensor)
        assert torch.equal(padded[:32].dequantize(), tensor.dequantize())

"""Writing through a slice changes that slice, or is refused; it never changes the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.errors import UnsupportedOp
from ao_core.tensor import repack
from ao_core.tensor.relayout import to_canonical

ROW = Spec("int8", (1, WHOLE))
TENSOR = Spec("f8e4m3", (WHOLE, WHOLE))
GROUP = Spec("int4", (1, 32), "bfloat16", layout="packed")


def _tensor(spec: Spec, dtype: torch.dtype = torch.float32, seed: int = 0) -> QTensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
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


def test_a_slice_of_a_kernel_layout_writes_to_the_whole() -> None:
    tensor = repack(_tensor(GROUP, torch.bfloat16))
    assert tensor.spec.layout == "int4_cpu"
    before = tensor.dequantize()
    piece = tensor[:16]
    assert torch.equal(piece.dequantize(), before[:16])
    piece.zero_()
    assert not tensor.dequantize()[:16].any()
    assert torch.equal(tensor.dequantize()[16:], before[16:])


def test_codes_are_copied_between_layouts() -> None:
    """As loaders do, `weight.narrow(...).copy_(loaded)`: to quantize once more would cost accuracy."""
    loaded, other = repack(_tensor(GROUP, torch.bfloat16, seed=1)), _tensor(GROUP, torch.bfloat16)
    assert loaded.spec.layout == "int4_cpu"
    values = loaded.dequantize()
    assert not torch.equal(quantize_tensor(values, GROUP).dequantize(), values)
    whole = repack(other)
    for target in (repack(other), other, whole.narrow(0, 0, 32)):
        target.copy_(loaded)
        assert torch.equal(target.dequantize(), values)
    assert torch.equal(whole[:32].dequantize(), values)
    canonical = repack(_tensor(GROUP, torch.bfloat16, seed=2))
    canonical.copy_(to_canonical(loaded))
    assert torch.equal(canonical.dequantize(), values)


def test_shards_beyond_the_last_row_are_empty() -> None:
    tensor = _tensor(ROW)
    assert tensor.new_empty((0,)).shape == (0, 64)
    # what FSDP2 does to pad a shard
    for spec in (ROW, TENSOR, GROUP):
        tensor = _tensor(spec)
        padded = tensor.new_zeros((40, 64))
        padded.narrow(0, 0, 32).copy_(tensor)
        assert torch.equal(padded[:32].dequantize(), tensor.dequantize())


@pytest.mark.parametrize("block", [(1, 4, 32), (2, 4, 32)])
def test_a_block_over_rows_is_never_viewed_apart(block: tuple[int, ...]) -> None:
    """A view of a tensor that has one row in a dimension can be dequantized, or is refused."""
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    tensor = quantize_tensor(x, Spec("int8", block))
    for shape in ((4, 64), (1, 1, 4, 64), (4, 1, 64), (2, 2, 64), (1, 4, 64), (256,)):
        try:
            view = tensor.view(*shape)
        except UnsupportedOp:
            continue
        assert torch.equal(view.dequantize(), tensor.dequantize().view(*shape))


def test_what_is_made_of_slices_is_written() -> None:
    """Stacked, joined, gathered, cloned: all parts are its own, also those that the slices share."""
    shared = Spec("int8", (WHOLE, WHOLE))
    tensor = _tensor(shared)
    before, first, second = tensor.dequantize(), tensor[:16], tensor[16:]
    for made in (torch.stack([first, second]), torch.cat([first, second]), first.clone()):
        made.copy_(torch.ones(made.shape))
        torch.testing.assert_close(made.dequantize(), torch.ones(made.shape), rtol=0.01, atol=0)
        assert torch.equal(tensor.dequantize(), before)

"""Joining tensors that have one scale for all their rows: each keeps its own."""

import pytest
import torch

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import UnsupportedOp
from ao_core.tensor import to_layout

ONE = (WHOLE, WHOLE)
SPECS = {
    "int8": Spec("int8", ONE),
    "packed": Spec("uint4", ONE, zero_point="int", layout="packed"),
    "offset": Spec("uint3", ONE, zero_point="offset", layout="packed"),
    "scale of scales": Spec(
        "f4e2m1", (1, 16), Spec("f8e4m3", ONE), layout="packed"
    ),
    "group of all rows": Spec("int4", (WHOLE, 16), layout="packed"),
}  # fmt: skip


def check(pieces, dim):
    joined = torch.cat(pieces, dim)
    assert isinstance(joined, QTensor)
    expected = torch.cat([piece.dequantize() for piece in pieces], dim)
    assert torch.equal(joined.dequantize(), expected)
    again = joined.clone()
    again.copy_(
        expected
    )  # it is a tensor of its format as any other, with scales that it chooses itself
    assert (again.dequantize() - expected).norm() < 0.2 * expected.norm()
    return joined


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [(10, 10), (12, 4, 8), (5, 7)], ids=str)
def test_along_rows(name, rows):
    pieces = [
        quantize_tensor(torch.randn(n, 40) * (i + 1), SPECS[name]) for i, n in enumerate(rows)
    ]
    joined = check(pieces, 0)
    assert joined.shape == (sum(rows), 40)


@pytest.mark.parametrize("name", SPECS)
def test_experts_along_their_rows(name):
    """As gate and up projections are joined: in a kernel's layout the values stay, too."""
    experts = [[quantize_tensor(torch.randn(10, 40), SPECS[name]) for _ in range(3)] for _ in "ab"]
    joined = check([torch.stack(each) for each in experts], 1)
    again = to_layout(joined, joined.spec.layout)
    assert torch.equal(again.dequantize(), joined.dequantize())


def test_transposed():
    pieces = [quantize_tensor(torch.randn(n, 24), SPECS["packed"]).t() for n in (8, 12)]
    check(pieces, 1)


def test_pieces_of_one_tensor_share_one_scale_again():
    whole = quantize_tensor(torch.randn(10, 24), SPECS["int8"])
    pieces = [QTensor({"qdata": q, "scale": whole.scale}, whole.spec, q.shape, whole.dtype) for q in
              whole.qdata.split([6, 4])]  # fmt: skip
    assert torch.cat(pieces).spec == whole.spec


def test_columns_are_refused():
    pieces = [quantize_tensor(torch.randn(4, 16), SPECS["int8"]) for _ in "ab"]
    with pytest.raises(UnsupportedOp, match="do not share one 'scale'"):
        torch.cat(pieces, 1)

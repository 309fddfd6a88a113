"""Slices of weights of every recipe: written, multiplied, stacked and gathered as those of dense ones."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ao_quant
from ao_core import QTensor, Spec, quantize_
from ao_core.ext import UnsupportedOp

_RECIPES = [r for r in ao_quant.recipes.RECIPES if "static" not in r.name]
_IDS = [recipe.name for recipe in _RECIPES]
_SHAPE = (128, 512)
#: slices of a matrix, on the borders of blocks of 32 and of 256 columns
_SLICES = {
    "rows": lambda w: w[32:96],
    "columns": lambda w: w[:, 256:],
    "first columns": lambda w: w[:, :256],
    "rows and columns": lambda w: w[:64, 256:],
    "chunk": lambda w: w.chunk(2, 1)[1],
}


def _weight(recipe: str, seed: int, canonical: bool) -> QTensor:
    layer = nn.Linear(_SHAPE[1], _SHAPE[0], bias=False, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    layer.weight.data = torch.randn(*_SHAPE, generator=generator).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(layer, recipe, strict=True)
    weight = layer.weight.data
    assert isinstance(weight, QTensor)
    return weight.canonical() if canonical else weight


def _shares_scales(weight: QTensor) -> bool:
    """Whether rows have scales together, so that one cannot be written alone."""
    spec = weight.spec
    return isinstance(spec.scale_dtype, Spec) or spec.block[0] != 1


def _is_uncut(weight: QTensor, name: str) -> bool:
    """Whether a slice goes through blocks, or through codes that share a byte."""
    rows = weight.spec.block[0] > 1 and "rows" in name  # 128 of them
    return rows or (weight.canonical().spec.layout == "digits" and name != "rows")


@pytest.mark.parametrize("canonical", [True, False], ids=["canonical", "of kernels"])
@pytest.mark.parametrize("recipe", _IDS)
def test_slices_are_written(recipe: str, canonical: bool) -> None:
    """As vLLM loads the shards of a weight."""
    weight, other = (_weight(recipe, seed, canonical) for seed in (0, 1))
    before = weight.dequantize()
    try:
        source = other.narrow(0, 32, 32)
    except UnsupportedOp:
        assert _is_uncut(weight, "rows")
        return
    refused = None
    try:
        weight.narrow(0, 64, 32).copy_(source)
    except UnsupportedOp as error:
        refused = str(error)
    if refused is not None:
        assert "'scale'" in refused
        assert _shares_scales(weight)
        assert torch.equal(weight.dequantize(), before)
        return
    after = weight.dequantize()
    assert torch.equal(after[64:96], source.dequantize())
    assert torch.equal(after[:64], before[:64])
    assert torch.equal(after[96:], before[96:])


@pytest.mark.parametrize("canonical", [True, False], ids=["canonical", "of kernels"])
@pytest.mark.parametrize("recipe", _IDS)
def test_slices_multiply_as_the_dense_slices(recipe: str, canonical: bool) -> None:
    weight = _weight(recipe, 0, canonical)
    dense = weight.dequantize()
    # activations in 4 bits are off by a tenth themselves
    bound = 0.01 if weight.spec.act is None else 0.2
    for name, cut in _SLICES.items():
        try:
            piece = cut(weight)
        except UnsupportedOp:
            assert _is_uncut(weight, name), name
            continue
        expected = cut(dense)
        assert torch.equal(piece.dequantize(), expected), name
        for rows in (1, 5):
            generator = torch.Generator().manual_seed(2)
            x = torch.randn(rows, piece.shape[1], generator=generator).bfloat16()
            for out in (F.linear(x, piece), x @ piece.t()):
                _check(out, x.double() @ expected.double().t(), bound)


@pytest.mark.parametrize("canonical", [True, False], ids=["canonical", "of kernels"])
@pytest.mark.parametrize("recipe", _IDS)
def test_slices_are_stacked_and_gathered(recipe: str, canonical: bool) -> None:
    """What comes of it has memory of its own: writing it changes nothing else."""
    weight, other = (_weight(recipe, seed, canonical) for seed in (0, 1))
    if _is_uncut(weight, "rows"):
        return
    before, index = weight.dequantize(), torch.tensor([3, 0, 3])
    stacked = torch.stack([weight[:64], weight[64:]])
    assert torch.equal(stacked.dequantize(), torch.stack([before[:64], before[64:]]))
    new = torch.stack([other[:64], other[64:]])
    stacked.copy_(new)
    assert torch.equal(stacked.dequantize(), new.dequantize())
    gathered = weight[:64].index_select(0, index)
    assert torch.equal(gathered.dequantize(), before[:64][index])
    joined = torch.cat([weight[64:], weight[:64]])
    assert torch.equal(joined.dequantize(), torch.cat([before[64:], before[:64]]))
    joined.copy_(other.canonical())
    assert torch.equal(joined.dequantize(), other.dequantize())
    assert torch.equal(weight.dequantize(), before)


def _check(actual: Tensor, expected: Tensor, bound: float) -> None:
    assert actual.shape == expected.shape
    assert (actual.double() - expected).norm() <= bound * expected.norm()

"""What happens to a model after it was quantized: ties, copies, dtypes, state dicts and files."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from ao_core import QTensor, dequantize_, quantize_


def _model(recipe=None):
    model = nn.Sequential(nn.Linear(40, 33), nn.GELU(), nn.Linear(33, 8)).eval()
    if recipe is not None:
        quantize_(model, recipe)
        assert isinstance(model[0].weight, QTensor)
    return model


def _same(a, b):
    assert a.spec == b.spec
    assert a.dtype == b.dtype
    for (name, left), (other, right) in zip(a.leaves(), b.leaves(), strict=True):
        assert name == other
        # bytes, since torch compares no float8
        assert torch.equal(
            left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
        )


class Tied(nn.Module):
    """An embedding whose weight is that of the output layer too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 19, bias=False)
        self.embed = nn.Embedding(19, 32)
        self.embed.weight = self.head.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_tied_weights_stay_tied(recipe):
    model = Tied()
    report = quantize_(model, recipe, lambda module, name: True)
    (record,) = report.with_status("quantized")
    assert record.tied == ("embed.weight",)
    assert isinstance(model.head.weight, QTensor)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 19)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    dequantize_(model)
    assert model.head.weight is model.embed.weight


def test_quantizing_twice_is_harmless_and_reported(recipe):
    model = _model(recipe)
    before = model[0].weight
    report = quantize_(model, recipe)
    assert model[0].weight is before
    assert not report.with_status("quantized")
    (kept,) = [record for record in report if record.fqn == "0.weight"]
    assert "quantized already" in kept.reason


def test_deepcopy_shares_no_memory(recipe):
    model = _model(recipe)
    twin = copy.deepcopy(model)
    _same(model[0].weight, twin[0].weight)
    mine = {leaf.data_ptr() for _, leaf in model[0].weight.leaves()}
    assert mine.isdisjoint(leaf.data_ptr() for _, leaf in twin[0].weight.leaves())
    x = torch.randn(3, 40)
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_dtype_after_quantizing(recipe, dtype, sqnr_db):
    model, x = _model(recipe), torch.randn(4, 40)
    with torch.no_grad():
        expected = model(x)
        model.to(dtype)
        out = model(x.to(dtype))
    assert model[0].weight.dtype == out.dtype == dtype
    assert isinstance(model[0].weight, QTensor)
    # a different rounding of an activation moves it by a whole step where they are quantized
    assert sqnr_db(expected, out) > (22 if "dynamic" in recipe else 35)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_of_a_quantized_model(recipe, assign):
    source, target = _model(recipe), _model(recipe)
    x = torch.randn(3, 40)
    assert not torch.equal(source(x), target(x))
    before = target[0].weight
    assert str(target.load_state_dict(source.state_dict(), assign=assign)).startswith("<All keys")
    _same(source[0].weight, target[0].weight)
    assert (target[0].weight is before) == (not assign)
    assert torch.equal(source(x), target(x))


def test_load_state_dict_of_a_dense_model_quantizes_it(recipe):
    dense, target = _model(), _model(recipe)
    target.load_state_dict(dense.state_dict())
    quantize_(dense, recipe)
    _same(dense[0].weight, target[0].weight)


def test_save_and_load_the_model(recipe, tmp_path):
    model, x = _model(recipe), torch.randn(3, 40)
    model(x)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    _same(model[0].weight, again[0].weight)
    assert torch.equal(model(x), again(x))


@pytest.mark.parametrize("mmap", [False, True])
def test_save_and_load_the_state_dict_without_unpickling_code(recipe, mmap, tmp_path):
    model, other = _model(recipe), _model(recipe)
    path = tmp_path / "state.pt"
    torch.save(model.state_dict(), path)
    state = torch.load(path, weights_only=True, mmap=mmap)
    other.load_state_dict(state, assign=True)
    _same(model[0].weight, other[0].weight)
    x = torch.randn(3, 40)
    assert torch.equal(model(x), other(x))


def test_a_saved_model_is_as_small_as_reported(recipe):
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    report = quantize_(model, recipe)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert report.bytes_after <= buffer.tell() <= report.bytes_after + 8192


def test_dequantize_gives_the_stored_values(recipe):
    model = _model(recipe)
    values = model[0].weight.dequantize()
    assert dequantize_(model) == ["0.weight", "2.weight"]
    assert torch.equal(model[0].weight, values)
    assert not isinstance(model[0].weight, QTensor)

"""Part of `LayoutSuite`: saving, loading and copying of tensors and modules."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ao_core.tensor import QTensor, repack, to_layout
from ao_core.testing.layout_values import memory_of, same_parts
from ao_core.testing.samples import Sample

__all__ = ["LayoutState", "Tied", "linear_of"]


def linear_of(q: Tensor, bias: bool = True) -> nn.Linear:
    """A linear layer with this weight and a bias that is the same in every run."""
    out_features, in_features = q.shape
    layer = nn.Linear(in_features, out_features, bias=bias, device="meta")
    layer.weight = nn.Parameter(q, requires_grad=False)
    if bias:
        values = torch.linspace(-1, 1, out_features, device=q.device)
        layer.bias = nn.Parameter(values, requires_grad=False)
    return layer


class Tied(nn.Module):
    """A model of two layers, an embedding tied to the last, and a dense norm."""

    def __init__(self, q: Tensor) -> None:
        super().__init__()
        rows, features = q.shape
        self.embedding = nn.Embedding(rows, features, device="meta")
        self.norm = nn.LayerNorm(features)
        self.head = linear_of(q)
        self.embedding.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of each id."""
        out: Tensor = self.head(self.norm(self.embedding(ids)))
        return out


def _pickles(plain: Tensor) -> bool:
    try:
        pickle.loads(pickle.dumps(plain))
    except AttributeError:
        return False
    return True


def same_tensor(a: Tensor, b: Tensor) -> None:
    """Assert that two quantized tensors are alike in every respect."""
    assert isinstance(a, QTensor)
    assert isinstance(b, QTensor)
    assert (a.spec, a.shape, a.dtype, a.order, a.flat_from) == (
        b.spec,
        b.shape,
        b.dtype,
        b.order,
        b.flat_from,
    )
    assert same_parts(a, b)
    assert torch.equal(a.dequantize(), b.dequantize())


class LayoutState:
    """What leaves the process, and what comes back."""

    layout: str

    @pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
    def test_torch_save(self, mmap: bool, sample: Sample, tmp_path: Path) -> None:
        """torch.save and torch.load(weights_only=True): bit for bit, transposed ones too."""
        q = sample.quantized(dtype=torch.bfloat16)
        state = {"q": q, "rolled": q.permute([*range(1, q.dim()), 0]), "flat": q.view(-1)}
        torch.save(state, tmp_path / "state.pt")
        again = torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap)
        for name, tensor in state.items():
            same_tensor(again[name], tensor)

    def test_deepcopy_and_pickle(self, sample: Sample) -> None:
        """Copies are alike, have memory of their own, and stay parameters."""
        q = sample.quantized()
        same_tensor(copy.deepcopy(q), q)
        # torch 2.13 cannot pickle plain tensors of float8 outside torch.save
        if all(_pickles(leaf) for _, leaf in q.leaves()):
            same_tensor(pickle.loads(pickle.dumps(q)), q)
            same_tensor(copy.copy(q), q)
        assert not q.numel() or not set(memory_of(copy.deepcopy(q))) & set(memory_of(q))
        parameter = nn.Parameter(q, requires_grad=False)
        again = copy.deepcopy(parameter)
        assert isinstance(again, nn.Parameter)
        same_tensor(again, parameter)

    def test_ties_survive(self, weight: Sample) -> None:
        """Deep copies, torch.save of the module and `.to` keep tied weights one tensor."""
        model = Tied(weight.quantized())
        ids = torch.arange(weight.shape[0])
        expected = model(ids)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for again in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            assert again.embedding.weight is again.head.weight
            assert torch.equal(again(ids), expected)
        again = copy.deepcopy(model).to(torch.bfloat16)
        assert again.embedding.weight is again.head.weight
        assert again(ids).dtype == torch.bfloat16

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    def test_load_state_dict(self, assign: bool, weight: Sample) -> None:
        """Quantized into quantized: the bits; the parameter stays one."""
        source, target = linear_of(weight.quantized()), linear_of(weight.quantized(seed=5))
        target.load_state_dict(source.state_dict(), assign=assign)
        assert isinstance(target.weight, nn.Parameter)
        assert not target.weight.requires_grad
        same_tensor(target.weight, source.weight)
        shared = memory_of(target.weight) == memory_of(source.weight)  # type: ignore[arg-type]
        assert shared == assign

    def test_load_dense_state_dict(self, weight: Sample) -> None:
        """Dense weights into a quantized layer are quantized; with assign they replace it."""
        dense = nn.Linear(weight.shape[1], weight.shape[0])
        dense.weight.data = weight.dense(seed=9)
        target = linear_of(weight.quantized())
        target.load_state_dict(dense.state_dict())
        same_tensor(target.weight, weight.quantized(seed=9))
        target.load_state_dict(dense.state_dict(), assign=True)
        assert not isinstance(target.weight, QTensor)
        assert torch.equal(target.weight, dense.weight)

    def test_load_quantized_into_dense(self, weight: Sample) -> None:
        """Into a dense layer go the values; with assign the layer becomes quantized."""
        source = linear_of(weight.quantized())
        target = nn.Linear(weight.shape[1], weight.shape[0])
        target.load_state_dict(source.state_dict())
        assert torch.equal(target.weight, source.weight.dequantize())
        target = nn.Linear(weight.shape[1], weight.shape[0], device="meta").requires_grad_(False)
        target.load_state_dict(source.state_dict(), assign=True)
        same_tensor(target.weight, source.weight)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_module_to_dtype(self, dtype: torch.dtype, weight: Sample) -> None:
        """`.half()` and the like on a quantized layer: it computes in that dtype from then on."""
        q = weight.quantized()
        layer = linear_of(q.clone()).to(dtype)
        assert isinstance(layer.weight, nn.Parameter)
        assert isinstance(layer.weight, QTensor)
        assert layer.weight.dtype == dtype
        assert same_parts(layer.weight.canonical(), q.canonical())
        x = torch.ones(3, weight.shape[1], dtype=dtype)
        out = layer(x)
        assert out.dtype == dtype
        assert bool(torch.isfinite(out).all())

    def test_save_model(self, weight: Sample, tmp_path: Path) -> None:
        """save_model and load_model: canonical on disk, bit for bit back, ties included."""
        from ao_core.tensor.saving import load_model, save_model

        model = Tied(weight.quantized())
        ids = torch.arange(weight.shape[0])
        save_model(model, tmp_path / "model")
        for device in ("cpu", "meta"):
            with torch.device(device):
                fresh = Tied(torch.zeros(weight.shape))
            load_model(fresh, tmp_path / "model", device="cpu")
            assert fresh.embedding.weight is fresh.head.weight
            loaded = fresh.head.weight
            assert isinstance(loaded, QTensor)
            same_tensor(to_layout(loaded, self.layout), model.head.weight)
            # a layout made for another device is not what `load_model` chooses for this one
            assert torch.equal(fresh(ids), Tied(repack(weight.quantized()))(ids))

"""A small language model in tiles: lookups, tied weights, copies, and checkpoints that any machine reads."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import (
    QTensor,
    Spec,
    WeightOnlyConfig,
    load_model,
    quantize_,
    quantize_tensor,
    save_model,
)
from ao_core.ext import repack
from ao_core.testing.layout_values import same_parts

CONFIGS = {
    "int4": WeightOnlyConfig("int4", 32),
    "uint4": WeightOnlyConfig("uint4", 32, zero_point="int"),
    "nf4": WeightOnlyConfig("nf4", 64),
    "int8": WeightOnlyConfig("int8"),
    "f8e4m3": WeightOnlyConfig("f8e4m3"),
    "ternary": WeightOnlyConfig("ternary", 64),
}
IDS = torch.tensor([[0, 5, 99, 5, 7], [1, 2, 3, 4, 98]])


class Model(nn.Module):
    """Embedding, two layers, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.up, self.down = nn.Linear(64, 176), nn.Linear(176, 64, bias=False)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def model(name: str, dtype: torch.dtype = torch.float32) -> Model:
    """The same weights in every run."""
    generator = torch.Generator().manual_seed(0)
    made = Model().to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    quantize_(made, CONFIGS[name])
    for parameter in (made.embed.weight, made.up.weight, made.down.weight):
        assert isinstance(parameter, QTensor)
        assert parameter.spec.layout.startswith("cpu_tiles")
    return made


def densified(made: Model) -> Model:
    """The same model with the values of its weights."""
    dense = Model().to(made.up.bias.dtype)
    state = {
        k: v.dequantize() if isinstance(v, QTensor) else v for k, v in made.state_dict().items()
    }
    dense.load_state_dict(state)
    return dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_gives_what_its_values_give(name: str, dtype: torch.dtype) -> None:
    made = model(name, dtype)
    assert torch.equal(made.embed(IDS), densified(made).embed(IDS))
    with torch.no_grad():
        out, expected = made(IDS).double(), densified(made)(IDS).double()
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert float((out - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("name", CONFIGS)
def test_tied_weights_stay_one(name: str) -> None:
    made = model(name)
    assert made.head.weight is made.embed.weight
    again = copy.deepcopy(made)
    assert again.head.weight is again.embed.weight
    assert again.head.weight is not made.head.weight
    assert torch.equal(again(IDS), made(IDS))
    half = copy.deepcopy(made).to(torch.bfloat16)
    assert half.head.weight is half.embed.weight
    assert half(IDS).dtype == torch.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoints_are_canonical_and_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    made = model(name, torch.bfloat16)
    expected = made(IDS)
    save_model(made, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json.loads(data[8 : 8 + size]))
    assert "cpu_tiles" not in header
    assert ".table" not in header
    for device in ("cpu", "meta"):
        with torch.device(device):
            fresh = Model().to(torch.bfloat16)
        load_model(fresh, tmp_path / "saved", device="cpu")
        assert fresh.head.weight is fresh.embed.weight
        for key, tensor in made.state_dict().items():
            loaded = fresh.state_dict()[key]
            if isinstance(tensor, QTensor):
                assert loaded.spec == tensor.spec
                assert same_parts(loaded, tensor)
        assert torch.equal(fresh(IDS), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_pickles_and_state_dicts(name: str, tmp_path: Path) -> None:
    made = model(name)
    expected = made(IDS)
    torch.save(made, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(IDS), expected)
    torch.save(made.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for assign in (False, True):
        fresh = model(name)
        with torch.no_grad():
            fresh.up.weight.zero_()
        assert not torch.equal(fresh(IDS), expected)
        fresh.load_state_dict(state, assign=assign)
        assert torch.equal(fresh(IDS), expected)


def test_copies_forget_the_matmul_of_the_original() -> None:
    """What a weight remembers for its matmuls must not outlive a change, nor travel with a copy."""
    spec = Spec("int4", (1, 32), layout="packed")
    generator = torch.Generator().manual_seed(0)
    dense, x = torch.randn(2, 48, 64, generator=generator), torch.ones(3, 64)
    w = repack(quantize_tensor(dense[0], spec))
    first = F.linear(x, w)
    other = copy.deepcopy(w)
    w.copy_(dense[1])
    second = F.linear(x, repack(quantize_tensor(dense[1], spec)))
    assert torch.equal(F.linear(x, w), second)
    assert torch.equal(F.linear(x, other), first)
    torch.utils.swap_tensors(w, other)
    assert torch.equal(F.linear(x, w), first)
    assert torch.equal(F.linear(x, other), second)


def test_indices_out_of_range_raise_as_in_torch() -> None:
    w = repack(quantize_tensor(torch.ones(10, 64), Spec("int4", (1, 32), layout="packed")))
    for index in (-1, 10):
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([0, index]), torch.ones(10, 64))
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([0, index]), w)


@pytest.mark.parametrize("shape", [(4, 48, 64), (2, 33, 72)], ids=str)
@pytest.mark.parametrize("name", ["int4", "int8", "nf4"])
def test_weights_of_experts(name: str, shape: tuple[int, ...]) -> None:
    experts, _, k = shape
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    spec = Spec(name, (1, 32), layout="plain" if name == "int8" else "packed")
    w = repack(quantize_tensor(dense, spec))
    assert w.spec.layout.startswith("cpu_tiles")
    values = w.dequantize()
    x = torch.randn(experts, 5, k, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        torch.bmm(x, w.transpose(-2, -1)),
        torch.bmm(x, values.transpose(-2, -1)),
        rtol=1e-4,
        atol=1e-4,
    )
    for expert in range(experts):
        one = w[expert]
        assert one.spec == replace(w.spec, block=one.spec.block)
        assert torch.equal(one.dequantize(), values[expert])
        torch.testing.assert_close(F.linear(x[0], one), F.linear(x[0], values[expert]))
    rows = torch.randn(9, k, generator=torch.Generator().manual_seed(2)).bfloat16()
    ends = torch.tensor([2, 7] if experts == 2 else [2, 2, 6, 7], dtype=torch.int32)
    out = torch._grouped_mm(rows, w.transpose(-2, -1), ends)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        assert torch.equal(out[start:end], F.linear(rows[start:end], w[expert]))
        start = end
    assert not out[start:].any()

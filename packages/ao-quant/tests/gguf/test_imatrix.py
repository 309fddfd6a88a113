"""Importance matrices: from data, in files of both formats of llama.cpp, and back into a model."""

from __future__ import annotations

import copy
import struct

import pytest
import torch
from torch import nn

from ao_core import quantize_
from ao_core.ext import CheckpointError, ConfigError
from ao_quant.gguf import Imatrix, imatrix_of, read_imatrix, write_gguf, write_imatrix


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.down_proj(self.up_proj(x).relu())


class Model(nn.Module):
    """With the names of a Llama in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Module()])
        self.model.layers[0].mlp = Block()

    def forward(self, x):
        return self.model.layers[0].mlp(x)


UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def batches():
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, 2, 64)
    return [torch.randn(50, 64, generator=generator) * scale for _ in range(3)]


@pytest.mark.parametrize("binary", [False, True])
def test_files_keep_it_and_a_model_takes_it(tmp_path, binary):
    torch.manual_seed(0)
    model, data = Model().eval(), batches()
    made = imatrix_of(model, data, datasets=("a.txt",))
    x = torch.cat(data).double()
    torch.testing.assert_close(made.sums[UP][0], x.square().sum(0).float(), rtol=1e-5, atol=0)
    assert (made.chunks, made.chunk_size, made.rows[UP].tolist()) == (3, 50, [150.0])
    path = tmp_path / "imatrix"
    write_imatrix(path, made, names="transformers", binary=binary)
    assert set(read_imatrix(path).sums) == {"blk.0.ffn_up.weight", "blk.0.ffn_down.weight"}
    back = read_imatrix(path, names="transformers")
    assert (back.chunks, back.datasets) == (3, ("a.txt",))
    for name in (UP, DOWN):
        torch.testing.assert_close(back.means(name), made.means(name), rtol=1e-6, atol=0)
    other = copy.deepcopy(model)
    report = quantize_(other, "imatrix/int3-g32", data=back.seen())
    quantize_(model.model.layers[0].mlp.up_proj, "imatrix/int3-g32", data=data)
    again = model.model.layers[0].mlp.up_proj.weight.dequantize()
    assert torch.equal(other.model.layers[0].mlp.up_proj.weight.dequantize(), again)
    assert all(0.3 < r.error_vs_rtn < 1 for r in report.with_status("changed"))
    with pytest.raises(ConfigError, match=r"GPTQConfig needs hessian; pass batches"):
        quantize_(Model().eval(), "gptq/int3-g32", data=back.seen())


def test_weights_that_it_does_not_have_are_skipped_and_others_are_an_error():
    model, found = Model().eval(), imatrix_of(Model().eval(), batches())
    without = Imatrix({UP: found.sums[UP]}, {UP: found.rows[UP]})
    report = quantize_(model, "imatrix/int3-g32", data=without.seen())
    assert {r.fqn: r.status for r in report.records}[DOWN] == "skipped"
    wrong = Imatrix({UP: found.sums[DOWN]}, {UP: found.rows[DOWN]})
    with pytest.raises(
        ConfigError, match=r"statistics of .*up_proj.* of 96 columns, and it has 1 of 64"
    ):
        quantize_(Model().eval(), "imatrix/int3-g32", data=wrong.seen())


def test_experts_that_saw_nothing_count_evenly():
    found = Imatrix({"w": torch.tensor([[2.0, 4.0], [0.0, 0.0]])}, {"w": torch.tensor([2.0, 0.0])})
    assert found.means("w").tolist() == [[1.0, 2.0], [1.0, 1.0]]


def entry(name=b"blk.0.ffn_up.weight", calls=2, values=3, floats=3):
    return (
        struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, values) + b"\0" * 4 * floats
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "ends early"),
        (struct.pack("<i", -1), "-1 entries"),
        (struct.pack("<ii", 1, 1 << 20), "a name of 1048576 bytes"),
        (struct.pack("<i", 1) + entry(floats=2), "has 3 values"),
        (struct.pack("<i", 2) + entry(), "ends early"),
    ],
)
def test_damaged_files(tmp_path, data, text):
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=text):
        read_imatrix(path)


def test_other_gguf_files_are_none(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, {"a": torch.ones(4)}, {"general.type": "model"})
    with pytest.raises(CheckpointError, match=r"general\.type is 'model'"):
        read_imatrix(path)
    write_gguf(path, {"a.in_sum2": torch.ones(1, 4)}, {"general.type": "imatrix"})
    with pytest.raises(CheckpointError, match="'a.counts' is not"):
        read_imatrix(path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_imatrix(tmp_path / "none")

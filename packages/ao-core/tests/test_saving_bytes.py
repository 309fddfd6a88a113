"""What a checkpoint's bytes depend on: names and values, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_core import WHOLE, Spec, open_checkpoint, quantize_tensor, save_model


@pytest.mark.parametrize("size", ["5GB", 700], ids=["one file", "shards"])
def test_equal_tensors_give_equal_files_whatever_their_order(tmp_path, size):
    torch.manual_seed(0)
    layers = {str(i): nn.Linear(16, 8) for i in range(12)}
    for i in (2, 10):
        weight = quantize_tensor(layers[str(i)].weight.detach(), Spec("int8", (1, WHOLE)))
        layers[str(i)].weight = nn.Parameter(weight, requires_grad=False)
    layers["11"].weight = layers["3"].weight
    for name, order in {"a": list(layers), "b": list(layers)[::-1], "c": list(layers)}.items():
        model = nn.ModuleDict()
        for key in order:
            model[key] = layers[key]
        save_model(model, tmp_path / name, max_shard_size=size)
    files = [{f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "abc"]
    assert files[0] == files[1] == files[2]
    assert (len(files[0]) > 4) == (size == 700)
    opened = open_checkpoint(tmp_path / "a")
    assert opened.ties == {"11.weight": "3.weight"}
    where = [opened.slots[f"{i}.bias"].path.name for i in range(12)]
    assert where == sorted(where)  # layer 10 comes after layer 9

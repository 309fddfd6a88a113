"""FSDP2 in one process, as people debug: torch hands over the first gathered tensor only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.testing.programs import mesh_of_one

SPECS = {
    "int8-tensor": Spec("int8", (WHOLE, WHOLE)),
    "uint4-zero": Spec("uint4", (1, 32), "bfloat16", "int", "packed"),
    "nf4-double": Spec("nf4", (1, 32), Spec("f8e4m3", (WHOLE, WHOLE)), layout="packed"),
}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    with mesh_of_one(tmp_path) as mesh:
        yield mesh


@pytest.mark.parametrize("name", SPECS)
def test_gives_what_the_whole_model_gives(name: str, mesh: object) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 33))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(quantize_tensor(layer.weight.detach(), SPECS[name]), False)
    x = torch.linspace(-1, 1, 5 * 64).reshape(5, 64).requires_grad_()
    expected = model(x)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    for _ in range(3):
        out = model(x)
        out.sum().backward()
        assert torch.equal(out, expected)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    assert not torch.equal(model(x), expected)
    model.load_state_dict(state)
    assert torch.equal(model(x), expected)

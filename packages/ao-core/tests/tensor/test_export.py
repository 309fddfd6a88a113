"""torch.export and AOTInductor take quantized models as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.testing.programs import aot_inductor

ROW = (1, WHOLE)
SPECS = {
    "int8": Spec("int8", ROW),
    "int8-dynamic": Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int")),
    "int4": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "nf4-double": Spec("nf4", (1, 16), Spec("int8", (1, WHOLE)), layout="packed"),
    "e4m3": Spec("f8e4m3", ROW),
    "mx": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
}
IDS = torch.tensor([[1, 2, 3]])


class Model(nn.Module):
    def __init__(self, spec: Spec, last: Spec | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.a, self.b = nn.Linear(64, 48), nn.Linear(48, 33)
        for module, its in ((self.embed, SPECS["int8"]), (self.a, spec), (self.b, last or spec)):
            module.weight = nn.Parameter(quantize_tensor(module.weight.detach(), its), False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(self.embed(ids))))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", SPECS)
def test_exports_saves_and_loads(name: str, strict: bool, tmp_path: Path) -> None:
    model = Model(SPECS[name]).eval()
    expected = model(IDS)
    program = torch.export.export(model, (IDS,), strict=strict)
    torch.testing.assert_close(program.module()(IDS), expected)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(IDS), expected)


@pytest.mark.slow
def test_aot_inductor_package(tmp_path: Path) -> None:
    """One format in each layer: a package takes many seconds to compile."""
    model = Model(SPECS["int8"], SPECS["nf4-double"]).eval()
    with torch.no_grad():
        loaded = aot_inductor(model, (IDS,), tmp_path)
        torch.testing.assert_close(loaded(IDS), model(IDS), rtol=1e-4, atol=1e-5)

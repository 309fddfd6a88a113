"""Cells are measured once, in order, and written one by one; a file of something else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from calibrated import run
from calibrated.cells import FORMATS, NEAREST, Cell, cells_of
from calibrated.run import Subject, made_by_ao, measure
from torch import nn

from ao_core import quantize_


def subject() -> tuple[Subject, list[int]]:
    """A model of one matrix, and the seeds that were asked for."""
    asked: list[int] = []

    def original(seed: int) -> nn.Module:
        asked.append(seed)
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(128, 128)).requires_grad_(False)

    def data(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        mix = torch.eye(128) + torch.randn(128, 128) / 8
        return [torch.randn(64, 128) @ mix for _ in range(4)]

    def quality(seed: int, made: nn.Module) -> dict[str, float]:
        torch.manual_seed(seed)
        expected = nn.Sequential(nn.Linear(128, 128))
        x = data(seed)[0]
        return {"kl_nats": float((made(x) - expected(x)).square().mean())}

    return Subject(original, data, quality), asked


@torch.no_grad()
def test_cells_are_measured_once(tmp_path: Path) -> None:
    path, (model, asked) = tmp_path / "found.json", subject()
    table = [("int4 g128", (NEAREST, "GPTQ")), ("int2 g64", (NEAREST,))]
    cells = cells_of(table, 2)
    assert cells[:3] == [Cell(name, each, 0) for name, methods in table for each in methods]
    made: list[Cell] = []

    def make(dense: nn.Module, cell: Cell) -> tuple[nn.Module, float]:
        made.append(cell)
        return made_by_ao(model, dense, cell)

    measure(path, {"rows": 64}, cells[:4], model, make)
    measure(path, {"rows": 64}, cells, model, make)
    assert made == cells
    assert asked == [0, 1, 1]  # the second run begins within the second seed
    found = json.loads(path.read_text())
    assert [Cell(row["format"], row["method"], row["seed"]) for row in found["rows"]] == cells
    nearest, gptq, two = (row["kl_nats"] for row in found["rows"][:3])
    assert 0 < gptq < nearest < two
    assert 4.0 < found["rows"][0]["bits_per_weight"] < 4.4
    with pytest.raises(SystemExit, match="was measured with other rows"):
        measure(path, {"rows": 65}, cells, model, make)


def test_heads_do_not_count_as_weights() -> None:
    """They keep 8 bits in most recipes."""
    model = nn.ModuleDict({"body": nn.Linear(128, 128), "lm_head": nn.Linear(128, 1000)})
    assert run.bits_per_weight(model) == 0.0
    quantize_(model, FORMATS["int4 g128"])
    assert 4.0 < run.bits_per_weight(model) < 4.4

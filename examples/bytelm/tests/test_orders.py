"""Orders of columns, what is measured over them, and the table that is made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import orders
import pytest
import torch
from bytelm import cases, data
from bytelm.cases import Case
from bytelm.data import Corpus
from bytelm.model import ByteLM
from bytelm.orders import reordered
from torch import nn

import generate_quality
from ao_core import WeightOnlyConfig, quantize_


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(4))


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: module.weight for name, module in linear(model).items()}


def linear(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def test_the_function_stays_and_every_weight_is_reordered(model: ByteLM, ids: torch.Tensor) -> None:
    before = {name: weight.clone() for name, weight in weights(model).items()}
    state = torch.get_rng_state()
    made = reordered(model, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(logits(made, ids), logits(model, ids), rtol=1e-4, atol=1e-5)
    assert len(before) == 15
    for name, weight in weights(made).items():
        assert torch.equal(model.get_submodule(name).weight, before[name])
        assert not torch.equal(weight, before[name])
        assert torch.equal(weight.sort(dim=1).values, before[name].sort(dim=1).values)


def test_seeds_give_orders(model: ByteLM) -> None:
    first, again, other = (weights(reordered(model, seed)) for seed in (1, 1, 2))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert not torch.equal(weight, other[name])


def test_groups_hold_other_weights_and_rows_the_same(model: ByteLM, ids: torch.Tensor) -> None:
    def quantized(made: nn.Module, group: int | str) -> torch.Tensor:
        report = quantize_(made, WeightOnlyConfig("int4", group))
        assert len(report.with_status("changed")) == 15
        return logits(made, ids)

    original = logits(model, ids)
    by_row, by_group = (
        [quantized(reordered(model, seed), group) for seed in (0, 1)] for group in ("row", 8)
    )
    torch.testing.assert_close(by_row[0], by_row[1], rtol=1e-4, atol=1e-5)
    difference = (by_group[0] - by_group[1]).norm() / (by_group[0] - original).norm()
    assert 0.3 < difference < 3  # as errors that have little to do with one another


def test_measured_in_each_order(model: ByteLM, ids: torch.Tensor) -> None:
    model.requires_grad_(False)
    chosen = [
        Case("format", "int3", WeightOnlyConfig("int3", group), group, "absmax")
        for group in (4, "row")
    ]
    small, row = orders.measure(model, ids, chosen, seeds=(0, 1))
    assert (small["name"], small["scales"], small["group"]) == ("int3", "absmax", 4)
    assert len({small["natural"], *small["orders"]}) == 3
    assert all(0 < a < b for a, b in zip(small["orders"], row["orders"], strict=True))
    assert row["orders"] == pytest.approx([row["natural"]] * 2, rel=1e-3)
    assert not any(type(weight) is not nn.Parameter for weight in weights(model).values())


ABOUT = {
    "date": "today",
    "cpu": "a processor",
    "python": "3",
    "torch": "2",
    "ao-core": "1",
    "corpus": {"python": "3", "held_out_files": 2, "held_out_bytes": 9000},
    "windows": 2,
    "context": 512,
    "seeds": [0, 1],
}


def test_table() -> None:
    rows = [
        {"name": "int3", "scales": "mse", "group": 32, "natural": 0.03, "orders": [0.01, 0.02]},
        {"name": "int3", "scales": "mse", "group": 64, "natural": 0.02, "orders": [0.03, 0.03]},
        {"name": "int3", "scales": "mse", "group": "row", "natural": 0.025, "orders": [0.02, 0.03]},
    ]
    found = generate_quality.order_sections({"about": ABOUT, "rows": rows})
    assert "Byte model: 512 bytes, in windows of 512, of the 9000 in" in found["orders measured"]
    assert found["orders measured"].endswith("Random orders of the seeds 0, 1.")
    lines = found["orders"].splitlines()
    assert lines[0] == (
        "| format | scales | order | groups of 32 | groups of 64 | row | 64 over 32 | row over 64 |"
    )
    assert lines[2] == (
        "| `int3` | mse | natural | 0.03000 | 0.02000 | 0.02500 | -0.01000 | +0.00500 |"
    )
    assert lines[3] == (
        "| `int3` | mse | random | 0.01500 ± 0.00500 | 0.03000 ± 0.00000 | 0.02500 ± 0.00500 "
        "| +0.01500 ± 0.00500, 2 of 2 | -0.00500 ± 0.00500, 0 of 2 |"
    )
    assert lines[-2] == "- in the natural order, 1 of 2; `int3` mse, 64 over 32 (-0.01000)"
    assert lines[-1] == (
        "- in the mean over the random orders, 1 of 2; "
        "`int3` mse, row over 64 (-0.00500 ± 0.00500, 0 of 2)"
    )


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = data.tokens(b"def square(x):\n    return x * x\n\n" * 40)
    corpus = Corpus(text, text, ABOUT["corpus"])
    few = [case for case in cases.formats() if case.scales == "absmax" and case.group != 64]
    monkeypatch.setattr(cases, "formats", lambda: few)
    monkeypatch.setattr(data, "read_corpus", lambda: corpus)
    path = tmp_path / "orders.json"
    options = ["--formats", "int2", "--seeds", "0", "5", "--windows=1"]
    monkeypatch.setattr(sys, "argv", ["orders.py", "--json", str(path), *options])
    orders.main()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["name"], row["group"]) for row in found["rows"]] == [
        ("int2", 32),
        ("int2", 128),
        ("int2", "row"),
    ]
    assert (found["about"]["seeds"], found["about"]["windows"]) == ([0, 5], 1)
    sections = generate_quality.order_sections(found)
    assert "128 over 32" in sections["orders"]

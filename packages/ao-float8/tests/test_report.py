"""The report of a conversion says what is multiplied in which format, and claims no smaller memory."""

from __future__ import annotations

import pytest
from torch import nn

import ao_core

ROWS = "f8e4m3[1×*] × f8e4m3[1×*]"


@pytest.mark.parametrize(
    ("recipe", "matmuls"),
    [
        ("float8/rowwise", f"all three matmuls {ROWS}"),
        (
            "float8/rowwise_with_gw_hp",
            f"output {ROWS}, grad_input {ROWS}, grad_weight in high precision",
        ),
        ("int8_mixed_precision_training", "all three matmuls int8[1×*] × int8[1×*]"),
    ],
)
def test_the_matmuls_are_named(recipe: str, matmuls: str) -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 256))
    report = ao_core.quantize_(model, recipe)
    assert [r.spec for r in report.with_status("changed")] == [matmuls] * 2
    text = str(report)
    assert text.count(matmuls) == 2
    assert "are multiplied in low precision; they stay as they are, 132.4 kB in all" in text
    assert "→" not in text
    assert "after" not in text.splitlines()[0]
    assert repr(model).count("weight=(output ") == 2

"""Tables, JSON and page made of results."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
from minilm_demo import page, table
from minilm_demo.latency import Latency
from minilm_demo.metrics import Quality
from minilm_demo.results import Layer, Result, environment, to_json
from rich.console import Console

_NAME = "encoder.layer.0.attention.self.query.weight"


def _result(name: str, output_db: float, sqnr_db: float | None) -> Result:
    times = {
        dtype: Latency(4.0, 3.9, {"fp32": 2.0, "bf16": 1.0}, 7)
        for dtype in ("fp32", "bf16")
        if name not in ("fp32", "bf16") or dtype == name
    }
    layers = [
        Layer(_NAME, "changed", "", 4000, 1040, sqnr_db, "row_scaled"),
        Layer(
            "embeddings.word_embeddings.weight", "unchanged", "an <embedding>", 9000, 9000, None, ""
        ),
    ]
    return Result(
        name,
        f"summary of {name}",
        20_000_000,
        10_000_000,
        Quality(output_db, 0.99, 0.98, 0.25, 0.95),
        layers if sqnr_db else [],
        0.5,
        {"1 text": times},
    )


@pytest.fixture
def results() -> list[Result]:
    return [
        _result("fp32", math.inf, None),
        _result("bf16", 40.9, None),
        _result("int8/<row>", 31.1, 42.0),
    ]


@pytest.fixture
def about() -> dict[str, object]:
    return environment() | {"pairs": 100, "query_tokens": 20, "document_tokens": 24}


def test_json_has_every_figure_and_no_infinity(
    results: list[Result], about: dict[str, object]
) -> None:
    data = json.loads(
        to_json(results, {"compute": "for training"}, about), parse_constant=pytest.fail
    )
    assert [variant["name"] for variant in data["variants"]] == ["fp32", "bf16", "int8/<row>"]
    assert data["variants"][0]["quality"]["output_sqnr_db"] is None
    assert data["variants"][2]["weight_sqnr_db"] == 42
    assert data["variants"][2]["latency"]["1 text"]["bf16"]["speedup"]["bf16"] == 1
    assert data["left_out"] == {"compute": "for training"}
    assert data["about"]["torch"]


def test_tables(results: list[Result]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.sizes(results))
    console.print(table.speeds(results, "1 text"))
    lines = console.export_text().splitlines()
    rows = [line.split() for line in lines if line.strip().startswith("int8")]
    assert rows[0][1:] == ["10.0", "20.0", "42.0", "31.1", "0.9900", "0.9800", "0.250", "0.950"]
    assert rows[1][1:] == ["4.0", "2.00", "4.0", "1.00"]
    assert any("∞" in line for line in lines)


def test_the_standard_error_is_that_of_the_share(
    results: list[Result], about: dict[str, object]
) -> None:
    assert table.standard_error(results[0], 1200) == pytest.approx(0.0125)
    assert "about 4.3 points" in " ".join(table.notes(results, about))


def test_page_is_whole_escaped_and_needs_no_network(
    results: list[Result], about: dict[str, object]
) -> None:
    html = page.render(results, {"compute": "for <training>"}, about)
    assert html.count("<svg") == 4
    assert "int8/&lt;row&gt;" in html
    assert "an &lt;embedding&gt;" in html
    assert "for &lt;training&gt;" in html
    assert "<row>" not in html
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html)
    assert len(html) < 300_000

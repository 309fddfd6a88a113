"""What the benchmarks share: interleaved rounds, statistics, records, and the page made of them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import benchmarking
import generate_benchmarks


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    """Garbage is collected in every round, for which the objects of all other tests would be visited."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_rounds_alternate_in_shuffled_order_after_a_warm_up() -> None:
    calls: list[str] = []

    def measure(name: str, value: float) -> float:
        calls.append(name)
        assert not gc.isenabled()
        return value

    measures = {"a": lambda: measure("a", 1.0), "b": lambda: measure("b", 2.0)}
    samples = benchmarking.rounds_of(measures, 20)

    assert samples == {"a": [1.0] * 20, "b": [2.0] * 20}
    rounds = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert len(rounds) == 21
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert gc.isenabled()


def test_orders_are_balanced_and_the_first_of_each_round_is_announced() -> None:
    calls: list[str] = []
    first: list[str] = []
    names = "abc"
    measures = {name: lambda n=name: calls.append(n) or 1.0 for name in names}
    benchmarking.rounds_of(measures, 30, warm_up=0, before=first.append)  # type: ignore[arg-type]

    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert first == [order[0] for order in rounds]
    for place in range(3):
        assert all(sum(order[place] == name for order in rounds) == 10 for name in names)
    assert len({tuple(order) for order in rounds}) == 6


def test_without_warm_up_every_round_counts() -> None:
    values = iter([3.0, 4.0])
    assert benchmarking.rounds_of({"a": lambda: next(values)}, 2, warm_up=0) == {"a": [3.0, 4.0]}


def test_interleaved_gives_seconds_of_one_call() -> None:
    calls: list[int] = []
    samples = benchmarking.interleaved({"a": lambda: calls.append(0)}, rounds=3, repeats=10)
    assert len(calls) == 44  # a round to warm up, and three; each has an untimed call first
    assert all(0 < seconds < 0.1 for seconds in samples["a"])


def test_comparison_is_within_rounds() -> None:
    samples = {"dense": [1.0, 10.0, 1.0], "ours": [1.5, 15.0, 1.5]}  # a slow second round
    assert benchmarking.longer(samples, "ours", "dense") == 0.5
    assert benchmarking.paired(samples, "dense", "ours").median == 1.5


def test_a_paired_median_has_an_interval() -> None:
    noise = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drift = torch.linspace(
        1, 9, 40, dtype=torch.float64
    )  # the machine grows slow: ratios do not see it
    samples = {"ours": drift.tolist(), "dense": (drift * (1.3 + 0.02 * noise)).tolist()}
    before = torch.get_rng_state()
    found = benchmarking.paired(samples, "ours", "dense")
    assert found == benchmarking.paired(samples, "ours", "dense")
    assert torch.equal(torch.get_rng_state(), before)
    assert found.low < found.median < found.high
    assert 1.28 < found.low < 1.3 < found.high < 1.32
    assert benchmarking.paired({"a": [2.0], "b": [3.0]}, "a", "b") == (1.5, 1.5, 1.5)
    assert found.scaled(2).low == 2 * found.low
    assert benchmarking.Paired(1.0, 0.98765, 1.2).interval() == "0.988 to 1.2"


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (10, 1.3), (50, 2.5), (100, 4.0)])
def test_percentile(percent: float, value: float) -> None:
    assert benchmarking.percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.123"), (1234.5, "1234"), (12.34, "12.3"), (7, "7"), ("x", "x")],
)
def test_cells(value: object, text: str) -> None:
    assert benchmarking.cell(value) == text


def test_a_record_becomes_a_section_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "packages" / "ao-x" / "benchmarks" / "results" / "speed.json"
    rows = [{"contender": "dense", "µs": 10.04}, {"contender": "ours", "µs": 12.5}]
    benchmarking.record(path, "Speed", "Of a call.", rows)

    assert "dense      10" in capsys.readouterr().out
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["rows"] == rows
    assert {"commit", "date", "cpu", "cores", "load", "python", "versions"} == set(data["about"])
    assert data["about"]["versions"]["torch"]

    monkeypatch.setattr(generate_benchmarks, "ROOT", tmp_path)
    page = generate_benchmarks.results()
    assert page.startswith("## Speed\n\nOf a call.\n\n| contender | µs |\n| --- | --- |\n")
    assert "| ours | 12.5 |" in page
    assert f"commit {data['about']['commit']}" in page


def test_a_page_shows_its_own_table_and_further_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "speed.json"
    rows = [{"contender": "ours", "M": m, "µs": 10 * m} for m in (1, 4)]
    page = [{"contender": "ours", "M = 1": 10, "M = 4": 40}]
    benchmarking.record(path, "Speed", "Of a call.", rows, page=page, versions={"tool": "7.5"})

    assert capsys.readouterr().out.splitlines()[-1].split() == ["ours", "10", "40"]
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["rows"], data["page"]) == (rows, page)
    text = generate_benchmarks.render(data)
    assert "| contender | M = 1 | M = 4 |" in text
    assert "| ours | 10 | 40 |" in text
    assert "tool 7.5" in text


def test_options_are_numbers_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--rounds", "3", "--json", "a.json"])
    found = benchmarking.arguments("Speed.", rounds=10, repeats=5, shapes="4x4")
    assert (found.rounds, found.repeats, found.shapes) == (3, 5, "4x4")
    assert found.json == Path("a.json")


def test_without_records_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_benchmarks, "ROOT", tmp_path)
    assert generate_benchmarks.results() == "No measurements are recorded yet."

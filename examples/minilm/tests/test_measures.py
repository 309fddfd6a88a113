"""Quality and latency of the demo, on data whose results are known."""

from __future__ import annotations

import math

import pytest
import torch
from minilm_demo.latency import interleaved, percentile, summarize
from minilm_demo.metrics import nearest, quality, sqnr_db


def test_sqnr_of_a_tenth_of_the_amplitude_is_20_db() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert sqnr_db(x, x * 1.1) == pytest.approx(20, abs=1e-4)
    assert sqnr_db(x, x) == math.inf


def test_nearest_takes_the_first_of_equals() -> None:
    documents = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert nearest(torch.tensor([[1.0, 0.0]]), documents).tolist() == [1]


def test_quality() -> None:
    original = torch.eye(4)
    queries = original.clone()
    queries[0] = original[1]  # finds the wrong document
    found = quality(queries, original, original, original)
    assert found.accuracy == found.agreement == 0.75
    assert found.cosine_min == 0
    assert found.cosine_mean == pytest.approx(7 / 8)
    assert found.output_sqnr_db == pytest.approx(10 * math.log10(8 / 2))


def test_agreement_counts_the_same_answers_also_where_they_are_wrong() -> None:
    documents, queries = torch.eye(3), torch.eye(3)[[1, 1, 2]]
    found = quality(queries, documents, queries, documents)
    assert found.agreement == 1
    assert found.accuracy == pytest.approx(2 / 3)


class _Machine:
    """A clock that work moves, and that runs at half speed from some moment on."""

    def __init__(self, slow_from: float) -> None:
        self.now, self.slow_from, self.calls = 0.0, slow_from, []

    def work(self, name: str, seconds: float) -> None:
        self.calls.append(name)
        self.now += seconds * (2 if self.now >= self.slow_from else 1)


def test_interleaved_ratios_survive_a_machine_that_slows_down() -> None:
    machine = _Machine(slow_from=20.0)
    contenders = {
        "dense": lambda: machine.work("dense", 1.0),
        "fast": lambda: machine.work("fast", 0.25),
    }
    shares: list[float] = []
    samples = interleaved(
        contenders, seconds=60, max_rounds=100, on_round=shares.append, clock=lambda: machine.now
    )
    found = summarize(samples, {"dense": "dense"})

    assert set(samples["dense"]) == {1.0, 2.0}  # it did slow down
    assert found["fast"].speedup["dense"] == pytest.approx(4)
    assert found["fast"].interval["dense"] == pytest.approx((4, 4))
    assert found["dense"].speedup["dense"] == 1
    assert found["fast"].p10_ms == 250
    assert found["fast"].rounds == len(samples["fast"]) > 20
    assert shares == sorted(shares)
    assert shares[-1] == 1
    orders = {tuple(machine.calls[i : i + 2]) for i in range(0, len(machine.calls), 2)}
    assert orders == {("dense", "fast"), ("fast", "dense")}


@pytest.mark.parametrize(("limits", "rounds"), [((5, 50), 5), ((1, 3), 3), ((1, 50), 10)])
def test_rounds(limits: tuple[int, int], rounds: int) -> None:
    machine = _Machine(slow_from=math.inf)
    seconds = 0 if limits == (5, 50) else 10
    samples = interleaved(
        {"dense": lambda: machine.work("dense", 1.0)},
        seconds=seconds,
        min_rounds=limits[0],
        max_rounds=limits[1],
        clock=lambda: machine.now,
    )
    assert len(samples["dense"]) == rounds


def test_percentile_interpolates() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert percentile([1.0, 2.0], 10) == pytest.approx(1.1)
    assert percentile([7.0], 10) == 7

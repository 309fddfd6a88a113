"""The benchmark of GPU kernels, without a GPU: its time, what it survives, its bars, its model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import generate_benchmarks
from workspace import ROOT

GPU = ROOT / "packages" / "ao-kernels" / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder's modules can be imported, whatever else has their names, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(GPU))
    for path in GPU.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == GPU:
            del sys.modules[name]


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def case(clock: Clock, name: str, seconds: float, error: Exception | None = None) -> Any:
    """One that takes so long, gives a line, and may fail then."""

    def run() -> Iterator[dict[str, Any]]:
        clock.now += seconds
        yield {"name": name}
        if error is not None:
            raise error

    return SimpleNamespace(name=name, run=run)


def test_time_is_shared_by_weight_and_what_is_left_flows_on() -> None:
    from allowance import Allowance

    clock = Clock()
    allowance = Allowance(100, {"a": 2, "b": 1, "c": 1}, clock)
    assert allowance.begin("a") == 50
    clock.now += 10
    assert allowance.begin("b") == 45  # of the 90 that are left, by weights of b and c
    clock.now += 60
    assert allowance.begin("c") == 30
    clock.now += 40
    assert allowance.left() == 0


def test_no_case_is_begun_when_time_is_over() -> None:
    from allowance import collected, events

    clock = Clock()
    cases = [case(clock, name, 4) for name in "abcde"]

    def start(first: int, seconds: float) -> Iterator[dict[str, Any]]:
        yield {"machine": "before"}
        yield from events(cases, first, seconds, str, clock)
        yield {"finished": "after"}

    found = collected(start, 10, clock)
    assert [line["name"] for line in found["lines"]] == ["a", "b", "c"]
    assert found["left_out"] == ["d", "e"]
    assert clock.now == 112  # the last one began before the end
    assert (found["machine"], found["machine_after"], found["failed"]) == ("before", "after", [])


def test_a_case_that_fails_keeps_its_lines_and_the_others() -> None:
    from allowance import collected, events

    clock = Clock()
    cases = [case(clock, "a", 1, ValueError("no such kernel")), case(clock, "b", 1)]

    def start(first: int, seconds: float) -> Iterator[dict[str, Any]]:
        yield from events(cases, first, seconds, str, clock)
        yield {"finished": {}}

    found = collected(start, 10, clock)
    assert [line["name"] for line in found["lines"]] == ["a", "b"]
    assert found["failed"] == [{"case": "a", "reason": "no such kernel"}]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_process_that_ends_is_started_again_with_the_next_case(lost: int) -> None:
    from allowance import collected

    starts = []

    def start(first: int, seconds: float) -> Iterator[dict[str, Any]]:
        starts.append(first)
        yield {"cases": ["a", "b", "c"]}
        for number in range(first, 3):
            yield {"begun": number}
            if number == lost:
                return
            yield {"line": {"name": "abc"[number]}}
        yield {"finished": {}}

    found = collected(start, 10, Clock())
    assert starts == ([0, lost + 1] if lost < 2 else [0])
    assert [line["name"] for line in found["lines"]] == [n for n in "abc" if n != "abc"[lost]]
    assert found["failed"] == [{"case": "abc"[lost], "reason": "the process ended in this case"}]
    assert found["left_out"] == []


def test_a_process_that_is_killed_at_the_end_is_not_started_again() -> None:
    from allowance import collected

    clock = Clock()

    def start(first: int, seconds: float) -> Iterator[dict[str, Any]]:
        yield {"cases": ["a", "b"]}
        yield {"begun": 0}
        clock.now += seconds + 5

    found = collected(start, 10, clock)
    assert [each["case"] for each in found["failed"]] == ["a"]
    assert found["left_out"] == ["b"]


def test_a_process_that_never_begins_ends_its_part() -> None:
    from allowance import collected

    found = collected(lambda first, seconds: iter(()), 10, Clock())
    assert found["failed"] == [{"case": "its start", "reason": "the process ended before any case"}]


def made_up(share: float = 0.8, times: float = 1.8, tokens: float = 600) -> dict[str, Any]:
    """Results of all shapes of Llama-3-8B, as bars read them."""
    from shapes import LLAMA

    lines = []
    for name, shape in LLAMA.items():
        beside = {"bf16": 3.0, "torch int4 g128": times}
        common = {"name": name, "shape": list(shape), "kernel": "", "p10": 1.0, "p90": 1.0}
        ours = {**common, "contender": "ao int4 g128", "microseconds": 1.0, "beside": beside}
        lines += [{**ours, "rows": m, "share_of_copy": share} for m in (1, 64, 256)]
        for who, seconds in (("bf16", 2.3), ("ao int8", 2.0)):
            line = {**common, "contender": who, "microseconds": seconds, "beside": {}}
            lines.append({**line, "rows": 128, "share_of_copy": 0.5})
    lines.append({"name": "o", "rows": 1, "contender": "ao int4 g128", "failed": "out of memory"})
    run = {"mode": "eager", "slowest": 1.0, "fastest": 2.0, "text_tokens_per_second": 3.0}
    run |= {"model_bytes": 4e9, "peak_bytes": 5e9}
    models = [
        {**run, "model": "int4 g64", "tokens_per_second": tokens},
        {**run, "model": "int4 g64", "tokens_per_second": tokens - 100},
        {**run, "model": "bf16", "tokens_per_second": 240.0},
    ]
    part: dict[str, Any] = {"failed": [], "left_out": []}
    parts = {
        "weights": {**part, "lines": lines, "left_out": ["Flux qkv"]},
        "generation": {**part, "lines": models},
    }
    return {"date": "2026-01-02T03:04:05", "commit": "abc", "parts": parts}


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    from gpu_bars import judged

    return {what: verdict for what, _, _, verdict in judged(result)}


def test_bars_are_met_missed_or_not_measured() -> None:
    assert set(verdicts({}).values()) == {"not measured"}
    met = verdicts(made_up())
    assert (
        met["int4 g128, 1 row, large matrices: share of the copy bandwidth, the smallest"] == "met"
    )
    assert met["int4 g128, 1 row: over torch's int4"] == "met"
    assert met["int4 g128, 64 rows: over torch's int4"] == "missed"
    assert met["int8, 128 rows, all linear layers: over bf16"] == "met"
    assert met["decoding in int4 g64: over bf16"] == "met"
    assert (
        met["decoding in int8"]
        == met["int4 g128 in float16, 1 row: over gemlite"]
        == "not measured"
    )
    missed = verdicts(made_up(share=0.79, times=1.7, tokens=599))
    names = [name for name, verdict in met.items() if verdict == "met" and missed[name] == "met"]
    assert names == ["int8, 128 rows, all linear layers: over bf16", "decoding in bf16"]
    assert list(verdicts(made_up(times=8.1)).values()).count("missed") == 0


def test_attention_is_judged_where_contexts_are_long() -> None:
    what = "attention of one query over kv8, 32K tokens and more"
    line = {
        "contender": "ao kv8",
        "name": "decoding",
        "share_of_copy": 0.8,
        "beside": {"bf16": 1.8},
    }
    short = {**line, "context": 4096, "share_of_copy": 0.1, "beside": {"bf16": 0.5}}
    found = verdicts({"parts": {"attention": {"lines": [short]}}})
    assert found[f"{what}: over bf16"] == "not measured"
    both = [short, {**line, "context": 32768}]
    found = verdicts({"parts": {"attention": {"lines": both}}})
    assert found[f"{what}: over bf16"] == found[f"{what}: share of the copy bandwidth"] == "met"
    both.append({**line, "context": 131072, "beside": {"bf16": 1.7}})
    found = verdicts({"parts": {"attention": {"lines": both}}})
    assert found[f"{what}: over bf16"] == "missed"


def test_reports_say_what_failed_and_what_was_left_out() -> None:
    from report import markdown, summary

    for text in (markdown(made_up()), summary(made_up())):
        assert "- failed: ao int4 g128: out of memory (o 1)" in text
        assert "- left out, for time: Flux qkv" in text
        assert "| int4 g64 | eager | 600.0 | 1.0 to 2.0 | 3 | 4.00 | 5.00 |" in text
    assert "ao int4 g128 |  | 1.0 | 1.0 | 1.0 | 80% | bf16 3.00×" in markdown(made_up())


def test_the_documentation_shows_the_newest_results(tmp_path: Path) -> None:
    assert "nothing of this is measured" in generate_benchmarks.on_gpu(tmp_path)
    for day, tokens in (("2026-01-02", 700), ("2026-01-01", 650)):
        result = {**made_up(tokens=tokens), "date": day}
        (tmp_path / f"gpu-{day}.json").write_text(json.dumps(result), encoding="utf-8")
    page = generate_benchmarks.on_gpu(tmp_path)
    assert "700 tokens/s" in page
    assert "650" not in page


def test_the_model_decodes_as_its_dequantized_twin() -> None:
    import generation
    from decoder import Shape

    shape = Shape(layers=1, dim=256, heads=2, kv_heads=1, ffn=256, vocab=128, context=8)
    logits = {}
    for name in generation.MODELS:
        with torch.no_grad():
            assert generation.disagreement(name, "cpu", torch.float32, shape) < 1e-4
            torch.manual_seed(0)
            run = generation.Generator(generation.model_of(shape, name, "cpu", torch.float32), 8)
            run.step()
            logits[name] = run.logits
    for one, other in pairwise(logits.values()):  # quantized they are, and each in its own way
        assert 1e-3 < (one - other).norm() / other.norm() < 0.5


def test_sizes_of_the_model_are_those_of_llama() -> None:
    from generation import LLAMA
    from gpu_bars import LARGE
    from shapes import LLAMA as MATRICES
    from shapes import LLAMA_COUNTS

    elements = sum(LLAMA_COUNTS[name] * n * k for name, (n, k) in MATRICES.items())
    assert elements + LLAMA.vocab * LLAMA.dim == LLAMA.parameters == 8029995008
    assert {name for name, (n, k) in MATRICES.items() if n * k >= LARGE} == {
        "gate_up",
        "down",
        "head",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "run"),
    [
        ("weights", "in_process"),
        ("attention", "of_part"),
        ("sparsity", "of_part"),
        ("steps", "of_part"),
    ],
)
def test_parts_run_without_a_gpu(part: str, run: str) -> None:
    import run_all
    from allowance import collected

    found = collected(partial(getattr(run_all, run), part, "cpu", True, "0/1"), 120)
    assert found["lines"]
    assert found["failed"] == found["left_out"] == []
    assert not [line for line in found["lines"] if "failed" in line]
    assert all(line["p10"] <= line["microseconds"] <= line["p90"] for line in found["lines"])
    assert found["machine_after"]["copy_bytes_per_second"] > 0


def test_wrong_numbers_are_no_contender() -> None:
    from measuring import Setup, built, measured, of_matmul
    from weights import of_dense

    setup, dense = Setup("cpu", True, rotation=3 * 64 * 64 * 2, rounds=3), torch.randn(64, 64)

    def wrong() -> Any:
        found = of_dense(setup, dense)
        found.error = of_matmul(dense * 1.1)
        return found

    def absent() -> Any:
        raise ImportError("no such library")

    everyone = built({"dense": lambda: of_dense(setup, dense), "wrong": wrong, "absent": absent})
    assert (
        len(everyone.contenders["dense"].copies) == 2
    )  # and the first one: more than the rotation
    lines = {line["contender"]: line for line in measured(setup, everyone, torch.randn(3, 64), {})}
    assert lines["dense"]["beside"] == {}
    assert "must be less than" in lines["wrong"]["failed"]
    assert lines["absent"]["failed"] == "ImportError: no such library"


def test_every_share_belongs_to_a_part_and_a_title() -> None:
    from report import TITLES
    from run_all import GRACE, PARTS, SECONDS

    assert PARTS.keys() == TITLES.keys()
    assert all((GPU / f"{part}.py").is_file() for part in PARTS)
    assert SECONDS + GRACE < 8 * 60


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    import run_all

    monkeypatch.setattr(run_all, "GRACE", 0.2)  # torch takes longer to import
    start = time.monotonic()
    assert list(run_all.in_process("weights", "cpu", True, "0/1", 0, 0.0)) == []
    assert 0.2 <= time.monotonic() - start < 60

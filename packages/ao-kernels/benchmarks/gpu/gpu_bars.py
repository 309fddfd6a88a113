"""The bars that the GPU kernels have to clear, and what results say of them. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

from shapes import LLAMA, LLAMA_COUNTS

#: what `run_all.py` writes
Result = dict[str, Any]
Line = dict[str, Any]
INT4 = "ao int4 g128"
#: elements of weights that are called large
LARGE = 58_000_000
#: tokens of context from which attention is judged
LONG = 32768


@dataclass(frozen=True)
class Bar:
    """At least so much of a figure that is taken from results."""

    text: str
    least: float
    #: None where what it needs was not measured
    measured: Callable[[Result], float | None]
    #: how figures are written
    form: str = "{:.2f}×"


def lines(result: Result, part: str, **wanted: Any) -> list[Line]:
    """Those of a part with these values that did not fail."""
    found = result.get("parts", {}).get(part, {}).get("lines", [])
    return [
        line
        for line in found
        if "failed" not in line and all(line.get(key) == value for key, value in wanted.items())
    ]


def share(result: Result) -> float | None:
    """The smallest share of the copy bandwidth of int4 at one row, over large matrices of Llama-3-8B."""
    large = {name for name, (n, k) in LLAMA.items() if n * k >= LARGE}
    found = {
        line["name"]: line["share_of_copy"]
        for line in lines(result, "weights", contender=INT4, rows=1)
        if line["name"] in large and "bf16" in line["beside"]
    }
    return min(found.values()) if found.keys() == large else None


def times(peer: str, rows: int, result: Result) -> float | None:
    """Geometric mean, over matrices of Llama-3-8B, of how many times as fast as a peer int4 is."""
    found = [
        line["beside"][peer]
        for line in lines(result, "weights", contender=INT4, rows=rows)
        if line["name"] in LLAMA and peer in line["beside"]
    ]
    return geometric_mean(found) if found else None


def of_model(rows: int, result: Result) -> float | None:
    """How many times as fast as bf16 int8 is, in all linear layers of a step of Llama-3-8B."""

    def seconds(contender: str) -> float | None:
        found = {
            line["name"]: line["microseconds"]
            for line in lines(result, "weights", contender=contender, rows=rows)
        }
        if not found.keys() >= LLAMA.keys():
            return None
        return float(sum(found[name] * often for name, often in LLAMA_COUNTS.items()))

    dense, ours = seconds("bf16"), seconds("ao int8")
    return None if dense is None or ours is None else dense / ours


def decoded(model: str, result: Result) -> float | None:
    """Tokens per second, of the fastest way to run a model."""
    found = [line["tokens_per_second"] for line in lines(result, "generation", model=model)]
    return max(found, default=None)


def gain(result: Result) -> float | None:
    """Decoding in int4 over bf16."""
    ours, dense = decoded("int4 g64", result), decoded("bf16", result)
    return None if ours is None or dense is None else ours / dense


def attention(recipe: str, figure: str, result: Result) -> float | None:
    """The smallest gain over bf16, or share of the copy bandwidth, of decoding at `LONG` tokens and more."""
    found = [
        line["beside"].get("bf16") if figure == "gain" else line["share_of_copy"]
        for line in lines(result, "attention", contender=f"ao {recipe}", name="decoding")
        if line["context"] >= LONG
    ]
    return min(found) if found and None not in found else None


TINYGEMM, GEMLITE = "torch int4 g128", "gemlite int4 g128"
_TOKENS = "{:.0f} tokens/s"
BARS = (
    Bar(
        "int4 g128, 1 row, large matrices: share of the copy bandwidth, the smallest",
        0.8,
        share,
        "{:.0%}",
    ),
    *(
        Bar(
            f"int4 g128, {m} row{'s' * (m > 1)}: over torch's int4",
            least,
            partial(times, TINYGEMM, m),
        )
        for m, least in ((1, 1.8), (64, 5), (256, 8))
    ),
    Bar("int4 g128 in float16, 1 row: over gemlite", 1.5, partial(times, GEMLITE, 1)),
    Bar("int8, 128 rows, all linear layers: over bf16", 1.15, partial(of_model, 128)),
    *(
        Bar(f"decoding in {model}", least, partial(decoded, model), _TOKENS)
        for model, least in (("bf16", 240), ("int8", 400), ("int4 g64", 600))
    ),
    Bar("decoding in int4 g64: over bf16", 2.5, gain),
    *(
        Bar(f"attention of one query over {recipe}, 32K tokens and more: over bf16", least, measure)
        for recipe, least in (("kv8", 1.75), ("kv4", 2.8))
        for measure in [partial(attention, recipe, "gain")]
    ),
    Bar(
        "attention of one query over kv8, 32K tokens and more: share of the copy bandwidth",
        0.8,
        partial(attention, "kv8", "share"),
        "{:.0%}",
    ),
)


def judged(result: Result, bars: Iterable[Bar] = BARS) -> list[list[str]]:
    """A row for each bar: what, at least, measured, verdict."""
    rows = []
    for bar in bars:
        found = bar.measured(result)
        verdict = "not measured" if found is None else "met" if found >= bar.least else "missed"
        value = "" if found is None else bar.form.format(found)
        rows.append([bar.text, bar.form.format(bar.least), value, verdict])
    return rows

"""Results in Markdown. Plain Python: the documentation is made with it, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_bars import Line, Result, judged, lines

TITLES = {
    "weights": "Linear layers with quantized weights",
    "generation": "A model of Llama-3-8B's shape",
    "attention": "Attention over quantized keys and values",
    "two_operands": "Two operands in 8 bits",
    "sparsity": "Sparsity",
    "casts": "Casts",
    "steps": "A step of AdamW",
}
BARS = ("what", "at least", "measured", "verdict")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    written = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in written)


def markdown(result: Result) -> str:
    """All of it: bars, then each part with all its lines."""
    parts = [
        f"# Kernels on a GPU, {result['date']}",
        f"Commit {result['commit']}.",
        "## Bars",
        table(BARS, judged(result)),
    ]
    for name, part in result["parts"].items():
        parts += [f"## {TITLES[name]}", machine(part), *tables(name, part), *omitted(part)]
    return "\n\n".join(text for text in parts if text) + "\n"


def summary(result: Result | None) -> str:
    """What the documentation shows: bars and decoding, or that there is nothing yet."""
    if result is None:
        return table(BARS, judged({})) + "\n\nNo GPU was at hand: nothing of this is measured."
    first = next(iter(result["parts"].values()), {})
    parts = [
        f"{result['date']}, commit {result['commit']}.",
        machine(first),
        table(BARS, judged(result)),
    ]
    if rows := generated(lines(result, "generation")):
        parts.append(table(GENERATED, rows))
    missing = [note for part in result["parts"].values() for note in omitted(part)]
    return "\n\n".join(text for text in (*parts, *missing) if text)


def machine(part: Mapping[str, Any]) -> str:
    """Where a part ran, what the device reaches there, and its clocks before and after."""
    about = part.get("machine")
    if not about:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    reached = [f"copies {about['copy_bytes_per_second'] / 1e12:.2f} TB/s"]
    for name, peak in about["peak_operations_per_second"].items():
        reached.append(f"{name} {peak if isinstance(peak, str) else f'{peak / 1e12:.0f} T/s'}")
    said = [
        f"{about['device']}, CUDA {about['cuda']}; Python {about['python']}, {versions}",
        "; ".join(reached),
    ]
    after = part.get("machine_after", {}).get("clocks", {})
    for when, clocks in (("before", about["clocks_before"]), ("after", after)):
        if clocks:
            said.append(f"{when}: " + ", ".join(f"{key} {value}" for key, value in clocks.items()))
    return "\n".join(f"- {each}" for each in said)


GENERATED = (
    *("model", "run", "decoding, tokens/s", "slowest to fastest", "text, tokens/s"),
    *("model, GB", "peak, GB"),
)


def generated(found: Iterable[Line]) -> list[list[str]]:
    """A row for each way to run each model."""
    return [
        [
            line["model"],
            line["mode"],
            f"{line['tokens_per_second']:.1f}",
            f"{line['slowest']:.1f} to {line['fastest']:.1f}",
            f"{line['text_tokens_per_second']:.0f}",
            f"{line['model_bytes'] / 1e9:.2f}",
            f"{line['peak_bytes'] / 1e9:.2f}",
        ]
        for line in found
    ]


def tables(name: str, part: Mapping[str, Any]) -> list[str]:
    """The lines of a part that did not fail."""
    good = [line for line in part["lines"] if "failed" not in line]
    if not good:
        return []
    if name == "generation":
        return [table(GENERATED, generated(good))]
    header = (
        "case",
        "shape",
        "rows",
        "contender",
        "kernel",
        "µs",
        "p10",
        "p90",
        "of copy",
        "faster than",
    )
    return [table(header, (row(line) for line in good))]


def row(line: Line) -> list[str]:
    """One contender of one case; "faster than" lists how many times as fast as each other one it is."""
    case = " ".join(str(line[key]) for key in ("kind", "name") if key in line)
    beside = ", ".join(f"{other} {ratio:.2f}×" for other, ratio in line["beside"].items())
    return [
        case,
        "×".join(map(str, line["shape"])),
        str(line.get("rows", "")),
        line["contender"],
        line["kernel"],
        f"{line['microseconds']:.1f}",
        f"{line['p10']:.1f}",
        f"{line['p90']:.1f}",
        f"{line['share_of_copy']:.0%}" if line["share_of_copy"] else "",
        beside,
    ]


def omitted(part: Mapping[str, Any]) -> list[str]:
    """What failed, and what there was no time for."""
    said = [f"- failed: {each['case']}: {each['reason']}" for each in part["failed"]]
    seen: dict[str, list[str]] = {}
    for line in part["lines"]:
        if "failed" in line:
            place = " ".join(
                str(line[key]) for key in ("name", "kind", "rows", "mode") if key in line
            )
            who = line.get("contender", line.get("model"))
            seen.setdefault(f"{who}: {line['failed']}", []).append(place)
    said += [f"- failed: {reason} ({'; '.join(places)})" for reason, places in seen.items()]
    if part["left_out"]:
        said.append(f"- left out, for time: {'; '.join(part['left_out'])}")
    return ["\n".join(said)] if said else []

"""What the benchmarks of all packages share: interleaved timing, the machine, and JSON.

A benchmark is a script `packages/*/benchmarks/bench_*.py` (or `torchao_*.py`, for comparisons that need
torchao) that takes `--json FILE`. Contenders are timed in alternate rounds of one run, because a machine
changes its speed from one minute to the next: ratios within a round survive that, times do not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from workspace import ROOT, git

__all__ = [
    "Paired",
    "Row",
    "Samples",
    "arguments",
    "cell",
    "in_fresh_processes",
    "interleaved",
    "longer",
    "paired",
    "percentile",
    "record",
    "rounds_of",
]

#: seconds of each contender, round by round
Samples = dict[str, list[float]]
#: one line of a benchmark's table: column -> text or number
Row = dict[str, Any]

_PACKAGES = (
    *("torch", "ao-core", "ao-quant", "ao-kernels", "ao-float8", "ao-optim", "ao-sparsity"),
    *("ao-hf", "transformers", "safetensors", "torchao", "bitsandbytes"),
)


def arguments(description: str | None, **options: float | str) -> argparse.Namespace:
    """Parse `--json FILE` and one option for each number or text, with its default."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results there, too")
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        help_ = f"default: {default}" if default != "" else None
        parser.add_argument(flag, type=type(default), default=default, help=help_)
    return parser.parse_args()


def interleaved(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, repeats: int = 1
) -> Samples:
    """Seconds of a call of each contender: `repeats` calls at a time, in `rounds` rounds.

    A first round warms up and is not counted. Garbage is collected between rounds only. The first
    contender of a round is called once more, untimed: collection leaves cold caches and sleeping threads.
    """

    def sample(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    measures = {name: partial(sample, call) for name, call in contenders.items()}
    return rounds_of(measures, rounds, before=lambda first: contenders[first]())


def rounds_of(
    measures: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    warm_up: int = 1,
    before: Callable[[str], object] = lambda first: None,
) -> Samples:
    """What each of several measurements gives in each of several rounds.

    Orders are random, and balanced: with n measurements, each has every place once in n rounds.

    Args:
        measures: name -> takes one measurement.
        rounds: that are counted.
        warm_up: rounds before them.
        before: called with the name of the first measurement of each round, after garbage has been collected.
    """
    shuffle = random.Random(0).shuffle
    order = list(measures)
    samples: Samples = {name: [] for name in order}
    collecting = gc.isenabled()
    try:
        for number in range(warm_up + rounds):
            if number % len(order) == 0:
                shuffle(order)
            else:
                order = [*order[1:], order[0]]
            gc.collect()
            gc.disable()
            before(order[0])
            found = {name: measures[name]() for name in order}
            gc.enable()
            if number >= warm_up:
                for name, value in found.items():
                    samples[name].append(value)
    finally:
        if collecting:
            gc.enable()
        else:
            gc.disable()
    return samples


def in_fresh_processes(
    script: str, names: Sequence[str], rounds: int, *options: object
) -> tuple[Samples, dict[str, list[dict[str, float]]]]:
    """The "seconds", and all else, that `SCRIPT --child NAME OPTIONS` prints as JSON, in shuffled rounds."""
    printed: dict[str, list[dict[str, float]]] = {name: [] for name in names}

    def one(name: str) -> float:
        command = [sys.executable, script, "--child", name, *map(str, options)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        printed[name].append(json.loads(done.stdout))
        return printed[name][-1]["seconds"]

    return rounds_of({name: partial(one, name) for name in names}, rounds, warm_up=0), printed


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of them lie, interpolated linearly."""
    return torch.tensor(values, dtype=torch.float64).quantile(percent / 100).item()


def longer(samples: Samples, name: str, baseline: str) -> float:
    """Seconds that a contender takes longer than another: the median over the rounds."""
    return median(a - b for a, b in zip(samples[name], samples[baseline], strict=True))


class Paired(NamedTuple):
    """How many times as fast as another a contender is: the median of the ratios within rounds."""

    median: float
    #: ends of an interval that holds the true median with a probability of 95 %
    low: float
    high: float

    def scaled(self, factor: float) -> Paired:
        """All three times a positive number."""
        return Paired(*(factor * value for value in self))

    def interval(self) -> str:
        """The interval as text."""
        return f"{cell(self.low)} to {cell(self.high)}"


#: samples of rounds, drawn with replacement, that an interval is made from
RESAMPLES = 4000


def paired(samples: Samples, name: str, baseline: str) -> Paired:
    """How many times as fast as a baseline a contender is, with its interval.

    Ratios within a round survive changes of the machine's speed, which ratios of percentiles over all
    rounds do not. The interval is a bootstrap of rounds, always with the same draws.
    """
    pairs = zip(samples[baseline], samples[name], strict=True)
    ratios = torch.tensor([other / own for other, own in pairs], dtype=torch.float64)
    rounds = len(ratios)
    draws = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    medians = ratios[draws].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Paired(ratios.quantile(0.5).item(), low, high)


def record(
    path: Path | None,
    title: str,
    text: str,
    rows: Sequence[Row],
    *,
    page: Sequence[Row] = (),
    versions: Mapping[str, str] | None = None,
    keys: Sequence[str] = (),
) -> None:
    """Print a benchmark's table and, where there is a path, write it as JSON with the machine.

    Args:
        path: file to write, or None.
        title: what was measured, in a few words.
        text: how, and what the columns mean, in Markdown.
        rows: all with the same columns.
        page: the table as people read it, where `rows` are too many; printed and documented.
        versions: of programs that are no Python package, which were measured too.
        keys: columns that tell rows apart, where a table is measured in pieces: rows that the file has, and
            that were not measured again, stay.
    """
    if path is not None and keys and path.exists():
        rows = _merged(json.loads(path.read_text(encoding="utf-8")), rows, keys, path)
    print(f"{title}\n{text}\n")
    shown = page or rows
    columns = list(shown[0])
    table = [columns, *([cell(row[column]) for column in columns] for row in shown)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))
    if path is not None:
        about = environment()
        about["versions"].update(versions or {})
        data = {"title": title, "text": text, "about": about, "rows": list(rows)}
        if page:
            data["page"] = list(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _merged(
    before: dict[str, Any], rows: Sequence[Row], keys: Sequence[str], path: Path
) -> list[Row]:
    """The rows of a file, and others, which replace those of the same keys."""
    if before["about"]["cpu"] != _cpu():
        raise SystemExit(f"error: {path} was measured on {before['about']['cpu']}; name another")
    found = {tuple(row[key] for key in keys): row for row in (*before["rows"], *rows)}
    return list(found.values())


def cell(value: Any) -> str:
    """Text of a cell: numbers with three significant digits."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def environment() -> dict[str, Any]:
    """The commit, the machine and the versions that figures were measured with."""
    return {
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _commit() -> str:
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", root=ROOT)
        return git("rev-parse", "--short=12", "HEAD", root=ROOT) + (
            " and changes" if changed else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    """Name and, where there is one, the model number of the processor."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    model = (
        f" (family {fields['cpu family']}, model {fields['model']})"
        if "cpu family" in fields
        else ""
    )
    return name + model


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

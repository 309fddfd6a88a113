"""The first quarter of an hour on a GPU: are the kernels right, are they captured, how fast are they?

`python first_hour.py` runs what METHOD.md says, each step in processes of its own, and writes
`OUT/first-hour.json` after each. It exits with 0 where all steps passed, 1 where one did not, and 3 without a
GPU. `--dry-run` prints the steps, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from run_all import GRACE, HERE, commit

#: time of all steps together; what a process needs to start and to end, on top of that given to `run_all.py`
SECONDS, MARGIN = 900.0, GRACE + 15.0
#: processes that compile kernels at the same time
SHARES = max(1, min(8, (os.cpu_count() or 2) // 2))
NO_GPU = 3
#: what compute-sanitizer says of errors that it found
_ERRORS = re.compile(r"(?:ERROR SUMMARY: [1-9]\d* error|RACECHECK SUMMARY: [1-9]\d* hazard)[^\n]*")


@dataclass(frozen=True)
class Step:
    """Commands that run at once, and how long they may."""

    name: str
    #: that it has in any case, and `most` where others leave time
    seconds: float
    #: "{seconds}" in them becomes those in which `run_all.py` begins cases
    commands: tuple[tuple[str, ...], ...]
    most: float = 0.0
    #: where `run_all.py` writes its results; None: nowhere
    results: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    #: begun only where all steps after it keep their time
    optional: bool = False
    #: why it cannot be run on this machine
    absent: str = ""

    def called(self, seconds: float) -> list[list[str]]:
        """The commands in a step of so many seconds; they end by themselves before these are over."""
        until = f"{max(seconds - MARGIN, 5):.0f}"
        return [[word.replace("{seconds}", until) for word in each] for each in self.commands]


def pack(*options: str) -> tuple[str, ...]:
    """A command of the pack."""
    return (sys.executable, str(HERE / "run_all.py"), *options, "--seconds", "{seconds}")


def steps(out: Path, about: Sequence[str]) -> list[Step]:
    """All, in their order."""

    def into(name: str, *options: str) -> tuple[str, ...]:
        return pack(*options, "--out", str(out / name), *about)

    shares = tuple(
        into(f"known/{i}", "--parts", "known", "--share", f"{i}/{SHARES}") for i in range(SHARES)
    )
    captures = into("captures", "--parts", "captures")
    return [
        Step("known answers", 160, shares, results=out / "known"),
        sanitized("memcheck", 110),
        sanitized("racecheck", 90, optional=True),
        Step("captures", 110, (captures,), results=out / "captures"),
        Step("benchmarks", 430, (into("benchmarks"),), most=480, results=out / "benchmarks"),
    ]


def sanitized(tool: str, seconds: float, *, optional: bool = False) -> Step:
    """Known answers, whose calls are small, below compute-sanitizer; each tensor in memory of its own."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    checker = (found, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9")
    return Step(
        f"compute-sanitizer {tool}",
        seconds,
        ((*checker, *pack("--parts", "known", "--tiny")),),
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        optional=optional,
        absent="" if Path(found).exists() else "compute-sanitizer is not on this machine",
    )


def run_steps(steps: Sequence[Step], out: Path, seconds: float, commit: str) -> dict[str, Any]:
    """Run them; the file is written after each, so that it has what there is when all is killed."""
    end = time.monotonic() + seconds
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report: dict[str, Any] = {"date": began, "commit": commit, "steps": []}
    out.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps):
        print(f"{step.name}: at most {step.seconds:.0f} s", file=sys.stderr, flush=True)
        left = end - time.monotonic()
        rest = sum(each.seconds for each in steps[number + 1 :] if not each.optional)
        if step.absent:
            found: dict[str, Any] = {"status": "left out", "reason": step.absent}
        elif left < (step.seconds + rest if step.optional else min(step.seconds, 2 * MARGIN)):
            found = {"status": "left out", "reason": f"{left:.0f} s were left"}
        else:
            most = max(step.seconds, min(step.most, left - rest))
            found = run_step(step, min(most, left), out / f"{number}.log")
        report["steps"].append({"step": step.name, **found})
        print(f"{step.name}: {found['status']}", file=sys.stderr, flush=True)
        file = out / "first-hour.json"
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        partial.replace(file)
    return report


def run_step(step: Step, seconds: float, log: Path) -> dict[str, Any]:
    """Until all commands have ended, or the time is over: then they are killed."""
    began = time.monotonic()
    options: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True}
    options["env"] = {**os.environ, **step.environment}
    commands = step.called(seconds)
    exits: list[int | None] = []
    with log.open("w", encoding="utf-8", errors="replace") as to:
        running = [subprocess.Popen(each, stdout=to, **options) for each in commands]
        try:
            for each in running:
                try:
                    exits.append(each.wait(max(0.1, began + seconds - time.monotonic())))
                except subprocess.TimeoutExpired:
                    exits.append(None)
        finally:
            # first asked: the processes of parts are in groups of their own, which `run_all.py` ends
            for how in (signal.SIGTERM, signal.SIGKILL):
                for each in running:
                    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(each.pid, how)
                        each.wait(5)
    text = log.read_text(encoding="utf-8", errors="replace")
    files = sorted(step.results.rglob("gpu-*.json")) if step.results else []
    results = [json.loads(file.read_text("utf-8"))["parts"] for file in files]
    failed = [each for parts in results for part in parts.values() for each in part["failed"]]
    failed += [{"case": step.name, "reason": each} for each in _ERRORS.findall(text)]
    right = all(code == 0 for code in exits) and not failed
    return {
        "status": "timed out" if None in exits else "passed" if right else "failed",
        "seconds": round(time.monotonic() - began, 1),
        "commands": [shlex.join(each) for each in commands],
        "exits": exits,
        "failed": failed,
        "results": results,
        "end_of_output": text[-4000:],
    }


def no_gpu() -> str | None:
    """Why there is nothing to run on, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return None if torch.cuda.is_available() else "torch finds no CUDA device on this machine"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("first-hour"), help="folder of results")
    parser.add_argument("--commit", default=commit(), help="that the wheels were built from")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all steps together")
    parser.add_argument("--dry-run", action="store_true", help="print the steps, and run nothing")
    options = parser.parse_args()
    chosen = steps(options.out, ("--commit", options.commit))
    if options.dry_run:
        for step in chosen:
            notes = ["if there is time"] * step.optional + [step.absent] * bool(step.absent)
            print(f"{step.name}, at most {step.seconds:.0f} s", *notes, sep=", ")
            for command in step.called(step.seconds):
                settings = [f"{key}={value}" for key, value in step.environment.items()]
                print("   ", *settings, shlex.join(command))
        return 0
    if reason := no_gpu():
        print(f"nothing is run: {reason}", file=sys.stderr)
        return NO_GPU
    report = run_steps(chosen, options.out, options.seconds, options.commit)
    bad = [each for each in report["steps"] if each["status"] in ("failed", "timed out")]
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Everything that is measured on one GPU, in one command and at most 8 minutes: see METHOD.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from allowance import Allowance, Event, collected, events
from report import markdown, omitted

#: part -> its weight when time is shared; the most important first
PARTS = {
    "weights": 34,
    "generation": 28,
    "attention": 10,
    "two_operands": 10,
    "sparsity": 6,
    "casts": 6,
    "steps": 6,
}
#: parts that check and measure nothing: those of `first_hour.py`
CHECKS = dict.fromkeys(("known", "captures"), 1)
#: seconds in which no case is begun any more, and after which a part that has not ended is killed
SECONDS, GRACE = 440.0, 25.0
HERE = Path(__file__).resolve().parent


def of_part(
    part: str, device: str, tiny: bool, share: str, first: int, seconds: float
) -> Iterator[Event]:
    """Run a part's cases in this process; what it takes to begin counts, too.

    `share` is "0/1" for all of them: of n shares, the number i has each n-th case from the i-th on.
    """
    began = time.monotonic()
    import torch
    from machine import clocks, copy_bandwidth, environment, peaks
    from measuring import Setup, told

    torch.manual_seed(0)
    small = tiny or part in CHECKS
    sizes = {"size": 1 << 20} if small else {}
    bandwidth = copy_bandwidth(device, **sizes)
    about = {"copy_bytes_per_second": bandwidth, "clocks_before": clocks(), **environment(device)}
    found = peaks(device, 64) if small else peaks(device)
    yield {"machine": {**about, "peak_operations_per_second": found}}
    few = {"rotation": 0.0, "rounds": 1} if tiny else {}
    setup = Setup(device, tiny, bandwidth=bandwidth, **few)
    with torch.no_grad():
        number, shares = map(int, share.split("/"))
        cases = import_module(part).cases(setup)[number::shares]
        yield from events(cases, first, seconds - (time.monotonic() - began), told)
    yield {
        "finished": {"clocks": clocks(), "copy_bytes_per_second": copy_bandwidth(device, **sizes)}
    }


def in_process(
    part: str, device: str, tiny: bool, share: str, first: int, seconds: float
) -> Iterator[Event]:
    """Run a part's cases in a process of its own: a kernel that crashes or hangs ends that alone."""
    command = [sys.executable, str(HERE / "run_all.py"), "--child", part, "--device", device]
    command += ["--first", str(first), "--seconds", str(seconds), "--share", share]
    command += ["--tiny"] * tiny
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **options) as process:

        def kill() -> None:
            with suppress(ProcessLookupError):  # compilers that it started are in its group
                os.killpg(process.pid, signal.SIGKILL)

        killer = threading.Timer(seconds + GRACE, kill)
        killer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    event = json.loads(line)
                    if not event.keys().isdisjoint({"begun", "failed", "left_out"}):
                        print(f"{part}: {line.strip()}", file=sys.stderr, flush=True)
                    yield event
        finally:
            killer.cancel()
            kill()


def child(options: argparse.Namespace) -> None:
    """Print the events of a part; what libraries print goes elsewhere."""
    out, sys.stdout = sys.stdout, sys.stderr
    chosen = options.device, options.tiny, options.share, options.first, options.seconds
    for event in of_part(options.child, *chosen):
        print(json.dumps(event), file=out, flush=True)


def measured(result: dict[str, Any]) -> dict[str, Any]:
    """The parts that measure."""
    parts = {part: found for part, found in result["parts"].items() if part in PARTS}
    return {**result, "parts": parts}


def commit() -> str:
    """Of the checkout that this file lies in, if any."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("--commit", default=commit(), help="that the wheels were built from")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="to begin cases in")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="little of everything; writes nothing")
    parser.add_argument(
        "--share", default="0/1", help="of each part's cases: every n-th from the i-th"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    # whoever ends this ends the part that runs, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu goes with --tiny: times of a CPU would mean nothing")
    parts = options.parts.split(",")
    weights = {**PARTS, **CHECKS}
    if unknown := set(parts) - set(weights):
        parser.error(f"--parts {sorted(unknown)}: there are {', '.join(weights)}")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    result: dict[str, Any] = {"date": now, "commit": options.commit, "parts": {}}
    allowance = Allowance(options.seconds, {part: weights[part] for part in parts})
    stem = options.out / f"gpu-{now.partition('+')[0].replace(':', '')}"
    for part in parts:
        start = partial(in_process, part, options.device, options.tiny, options.share)
        found = result["parts"][part] = collected(start, allowance.begin(part))
        if options.tiny:
            print(f"{part}: {len(found['lines'])} lines", *omitted(found), sep="\n")
            continue
        # as far as it has come: nobody knows what the next part does
        options.out.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        if part in PARTS:
            stem.with_suffix(".md").write_text(markdown(measured(result)), "utf-8")
    if not options.tiny:
        print(markdown(measured(result)))


if __name__ == "__main__":
    main()

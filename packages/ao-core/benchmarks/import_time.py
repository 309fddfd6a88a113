"""Seconds and modules that an import adds, each in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, Samples, paired, percentile, rounds_of

#: what is imported after torch
STATEMENTS = {
    "import ao_core": "import ao_core",
    "import ao_core, and use QTensor": "import ao_core; ao_core.QTensor",
}

_SCRIPT = """
import json, sys, time
start = time.perf_counter()
import torch
middle, modules = time.perf_counter(), len(sys.modules)
{statement}
end = time.perf_counter()
print(json.dumps([middle - start, end - middle, len(sys.modules) - modules]))
"""

#: torch imports ao itself where ao-hf-autoload is installed
_ALONE = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

TEXT = """\
Each figure is from fresh processes that import torch and then the rest, in alternate rounds, with warm file
caches; *added* is what comes after `import torch` in the same process, and *% of torch* the median of its
part of that."""


def measure(rounds: int, statements: dict[str, str]) -> list[Row]:
    """What each statement adds to `import torch`."""
    before: Samples = {name: [] for name in statements}
    modules: dict[str, int] = {}

    def one(name: str) -> float:
        command = [sys.executable, "-c", _SCRIPT.format(statement=statements[name])]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=_ALONE)
        first, added, modules[name] = json.loads(done.stdout)
        before[name].append(first)
        return float(added)

    samples = rounds_of({name: partial(one, name) for name in statements}, rounds)
    torch_seconds = [seconds for each in before.values() for seconds in each]
    rows: list[Row] = [
        {
            "statement": "import torch",
            "added ms": median(torch_seconds) * 1e3,
            "p10": percentile(torch_seconds, 10) * 1e3,
            "% of torch": 100.0,
            "95 %": "",
            "modules added": "",
        }
    ]
    for name, added in samples.items():
        # of the same process; the first one warmed up
        part = paired({"torch": before[name][-rounds:], "added": added}, "torch", "added")
        rows.append(
            {
                "statement": name,
                "added ms": median(added) * 1e3,
                "p10": percentile(added, 10) * 1e3,
                "% of torch": 100 * part.median,
                "95 %": part.scaled(100).interval(),
                "modules added": modules[name],
            }
        )
    return rows

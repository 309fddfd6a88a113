"""Write the recorded results, packages/*/benchmarks/results/*.json, into docs/benchmarks.md.

Those of QLoRA are in docs/hf/peft.md. Of those on a GPU, packages/ao-kernels/benchmarks/gpu/results/*.json,
the newest are shown.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarking import cell
from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = "packages/*/benchmarks/results/*.json"
#: results of one topic, and the page of that topic
QLORA = ROOT / "packages" / "ao-hf" / "benchmarks" / "results" / "qlora.json"
QLORA_PAGE = ROOT / "docs" / "hf" / "peft.md"
GPU = ROOT / "packages" / "ao-kernels" / "benchmarks" / "gpu"


def render(data: dict[str, Any]) -> str:
    """One benchmark: its title, what it measures, its table, and the machine."""
    shown = data.get("page", data["rows"])
    columns = list(shown[0])
    rows = [[cell(row[column]) for column in columns] for row in shown]
    about = data["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    machine = (
        f"{about['date']}, commit {about['commit']}; {about['cpu']}, {about['cores']} cores; "
        f"Python {about['python']}, {versions}."
    )
    return "\n\n".join([f"## {data['title']}", data["text"], table(columns, rows), machine])


def results() -> str:
    """All benchmarks, by package and name."""
    return rendered([path for path in sorted(ROOT.glob(RESULTS)) if path != QLORA])


def rendered(files: list[Path]) -> str:
    """The benchmarks of some files."""
    found = [render(json.loads(path.read_text(encoding="utf-8"))) for path in files]
    return "\n\n".join(found) or "No measurements are recorded yet."


def on_gpu(folder: Path = GPU / "results") -> str:
    """The bars of the GPU kernels, by the newest results there are."""
    newest = max(folder.glob("gpu-*.json"), default=None)
    found = newest and json.loads(newest.read_text(encoding="utf-8"))
    sys.path.append(str(GPU))
    text: str = import_module("report").summary(found)
    return text


if __name__ == "__main__":
    sections = {
        (PAGE, "gpu"): on_gpu(),
        (PAGE, "results"): results(),
        (QLORA_PAGE, "qlora"): rendered([QLORA] if QLORA.exists() else []),
    }
    sys.exit(main(sections, Path(__file__).name))

"""Write the recorded results, packages/*/benchmarks/results/*.json, into docs/benchmarks.md.

What was measured on several machines, NAME.json, NAME.MACHINE.json and so on, is one section. Those of QLoRA
are in docs/hf/peft.md. Of those on a GPU, packages/ao-kernels/benchmarks/gpu/results/*.json,
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


def render(*measured: dict[str, Any]) -> str:
    """One benchmark: its title, and of each machine what was measured, the table, and the machine."""
    texts, last = [f"## {measured[0]['title']}"], ""
    for data in measured:
        if data["text"] != last:
            texts.append(data["text"])
        texts += [_table(data), _machine(data["about"])]
        last = data["text"]
    return "\n\n".join(texts)


def _table(data: dict[str, Any]) -> str:
    shown = data.get("page", data["rows"])
    columns = list(shown[0])
    return table(columns, [[cell(row[column]) for column in columns] for row in shown])


def _machine(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['date']}, commit {about['commit']}; {about['cpu']}, {about['cores']} cores; "
        f"Python {about['python']}, {versions}."
    )


def results() -> str:
    """All benchmarks, by package and name."""
    return rendered([path for path in sorted(ROOT.glob(RESULTS)) if path != QLORA])


def rendered(files: list[Path]) -> str:
    """The benchmarks of some files; those of one benchmark are in one folder."""
    names = {path: path.with_name(path.name.partition(".")[0]) for path in files}
    found = [
        render(
            *(json.loads(path.read_text(encoding="utf-8")) for path in files if names[path] == name)
        )
        for name in dict.fromkeys(names.values())
    ]
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

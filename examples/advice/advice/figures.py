"""Figures in a JSON file: a run keeps those that are there, and writes each as soon as it is measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
from benchmarking import environment

Figures = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of the arguments of a script, which has its documentation in the first line."""
    found = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    found.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    return found


def read(path: Path, key: str, empty: Figures | list[Figures]) -> Figures:
    """The figures under a key of the file, `empty` where there is none, and what this run is measured on."""
    kept = json.loads(path.read_text(encoding="utf-8"))[key] if path.exists() else empty
    return {"about": environment() | {"threads": torch.get_num_threads()}, key: kept}


def write(path: Path, found: Figures) -> None:
    """All of them."""
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

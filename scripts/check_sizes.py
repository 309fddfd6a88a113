"""Fail where a source file is longer than 400 lines: split it by concern."""

from __future__ import annotations

import sys
from pathlib import Path

from workspace import ROOT, finish, project_files

LIMIT = 400
PATTERNS = ("*.py", "*.c", "*.cc", "*.cpp", "*.cu", "*.cuh", "*.h", "*.hpp")


def too_long(files: list[Path], root: Path = ROOT) -> list[str]:
    """One sentence for each file of more than `LIMIT` lines."""
    problems = []
    for path in files:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LIMIT:
            problems.append(f"{path.relative_to(root)}: {lines} lines, at most {LIMIT} are allowed")
    return problems


if __name__ == "__main__":
    sources = project_files(*PATTERNS)
    sys.exit(finish(too_long(sources), f"size of {len(sources)} source files"))

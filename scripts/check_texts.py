"""Fail where a file speaks of one machine (absolute paths) or names a package index's host."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from workspace import ROOT, finish, project_files

FORBIDDEN = {
    "machine path": re.compile(r"(?<![\w.~}/-])/(?:work|opt|root|home|tmp|Users)/\w"),
    "host of a package index": re.compile(
        r"\b(?:pypi|pythonhosted|npmjs|anaconda)\.(?:org|com)\b|\bdownload\.pytorch\.org\b"
    ),
}


def forbidden_texts(files: list[Path], root: Path = ROOT) -> list[str]:
    """One sentence, with file and line, for each forbidden text."""
    problems = []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture or another binary file
        for number, line in enumerate(lines, start=1):
            for kind, pattern in FORBIDDEN.items():
                if match := pattern.search(line):
                    place = f"{path.relative_to(root)}:{number}"
                    problems.append(f"{place}: {kind}: {match[0]!r}")
    return problems


if __name__ == "__main__":
    tracked = project_files()
    sys.exit(finish(forbidden_texts(tracked), f"texts of {len(tracked)} files"))

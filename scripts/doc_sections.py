"""Generated sections of documentation pages: text between two comments that a script rewrites."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workspace import ROOT, finish, load_toml, packages

__all__ = ["main", "project_plugins", "table"]

#: (page, name of the section) -> its text
Sections = dict[tuple[Path, str], str]
#: whether the text in a page and a fresh one say the same
Same = Callable[[str, str], bool]


def project_plugins() -> str:
    """AO_PLUGINS for the packages of this workspace: what else is installed does not belong here."""
    names: list[str] = []
    for package in packages():
        points = load_toml(package / "pyproject.toml")["project"].get("entry-points", {})
        names += points.get("ao.plugins", {})
    return ",".join(sorted(names))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(sections: Sections, script: str, same: Same = str.__eq__) -> int:
    """Write the sections into their pages; with --check, only say which are not fresh."""
    check = "--check" in sys.argv[1:]
    problems = []
    for (page, name), fresh in sections.items():
        text = page.read_text(encoding="utf-8")
        begin, end = f"<!-- begin {name}: {script} -->", f"<!-- end {name} -->"
        pattern = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.S)
        found = pattern.search(text)
        if found is None:
            problems.append(f"{page.relative_to(ROOT)}: no section {begin} … {end}")
        elif same(found[0].strip(), fresh.strip()):
            continue
        elif check:
            problems.append(
                f"{page.relative_to(ROOT)}: {name!r} is not fresh; run scripts/{script}"
            )
        else:
            middle = f"\n{fresh.strip()}\n\n"
            page.write_text(text[: found.start()] + middle + text[found.end() :], encoding="utf-8")
    return finish(problems, f"{len(sections)} sections of {script}")

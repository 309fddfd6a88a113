"""The documentation's code runs, and what it says is printed is what is printed.

In a page, every ```python block is run, in order, as one program. A ```text block right after one,
marked with ``<!-- output -->``, is what that block prints. Blocks that only include a file of
docs/examples are not run again: the files are run by themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(
    r"^(?P<mark><!-- output -->\n+)?```(?P<lang>\w+)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
INCLUDE = re.compile(r'--8<-- "(docs/examples/[\w.]+?\.py)')
SEPARATOR = "\x1e"


class Program(NamedTuple):
    """A page as a program, its lines where they are in the page, and what its blocks should print."""

    source: str
    expected: dict[int, str]


def program(page: Path) -> Program:
    text = page.read_text(encoding="utf-8")
    lines: list[str] = []
    expected: dict[int, str] = {}
    count = 0
    for match in BLOCK.finditer(text):
        body = match["text"]
        if match["mark"]:
            assert match["lang"] == "text" and count, f"{page}: output of no block"
            expected[count - 1] = body
        elif match["lang"] == "python" and not INCLUDE.search(body):
            start = text.count("\n", 0, match.start("text"))
            lines += [""] * (start - len(lines) - 1)
            lines.append(f"print({SEPARATOR!r}, end='')")
            lines += body.splitlines()
            count += 1
    return Program("\n".join(lines), expected)


PROGRAMS = {page: program(page) for page in PAGES}


def run(path: Path, source: str, folder: Path) -> str:
    """The standard output of a program of that name in a fresh process in `folder`."""
    launch = "import sys; exec(compile(sys.stdin.read(), sys.argv.pop(1), 'exec'), {'__name__': '__main__'})"
    done = subprocess.run(
        [sys.executable, "-c", launch, str(path)],
        input=source,
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, f"{path}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def normal(text: str) -> str:
    """Without what differs from run to run: times, and spaces at the ends of lines."""
    text = re.sub(r"\d+\.\d+ s\b", "… s", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    output = run(path, path.read_text(encoding="utf-8"), tmp_path)
    assert output.strip(), "an example ends by printing what it showed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page, code in PROGRAMS.items() if code.source],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    source, expected = PROGRAMS[page]
    printed = run(page, source, tmp_path).split(SEPARATOR)[1:]
    for block, text in expected.items():
        assert normal(printed[block]) == normal(text)


def test_every_example_is_shown_in_a_page() -> None:
    shown = {name for page in PAGES for name in INCLUDE.findall(page.read_text(encoding="utf-8"))}
    assert shown == {str(path.relative_to(ROOT)) for path in EXAMPLES}


def test_quickstart_of_the_readme_is_short() -> None:
    blocks = [
        m["text"] for m in BLOCK.finditer((ROOT / "README.md").read_text()) if m["lang"] == "python"
    ]
    (quickstart,) = blocks
    code = [line for line in quickstart.splitlines() if line.strip()]
    assert 5 <= len(code) <= 10

"""Run the code of documentation pages; `python scripts/run_docs.py PAGE …` writes what it prints into them.

In a page, every ```python block is run, in order, as one program in a process of its own. A ```text block
right after one, marked with ``<!-- output -->``, is what that block prints. Blocks that only include a
file of docs/examples are not run: the files are programs by themselves.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ao_core.testing.warm import run_python
from workspace import ROOT

__all__ = ["BLOCK", "INCLUDE", "PAGES", "Program", "normal", "program", "run", "run_page"]

PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(
    r"^(?P<mark><!-- output -->\n+)?```(?P<lang>\w+)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
#: pages about compiled kernels; the others show what is the same on every machine, without these
COMPILED = [
    ROOT / "docs" / "cpu-kernels.md",
    ROOT / "docs" / "cuda-kernels.md",
    ROOT / "docs" / "gpu-kernels.md",
    ROOT / "docs" / "install.md",
    *ROOT.glob("packages/ao-kernels/*.md"),
]
#: libraries for developers of plugins, which are installed from the repository
FOR_DEVELOPERS = ROOT / "packages" / "ao-kernels" / "checks"
INCLUDE = re.compile(r'--8<-- "(docs/examples/[\w./]+?)[:"]')
_SEPARATOR = "\x1e"


class Program(NamedTuple):
    """A page as a program whose lines are where the page has them."""

    source: str
    #: number of a block -> what it should print
    expected: dict[int, str]


def program(text: str) -> Program:
    """The program of a page; raises `ValueError` where an output follows no block."""
    lines: list[str] = []
    expected: dict[int, str] = {}
    count = 0
    for match in BLOCK.finditer(text):
        if match["mark"]:
            if not count or match["lang"] != "text":
                raise ValueError(f"an output that belongs to no block: {match[0]!r}")
            expected[count - 1] = match["text"]
        elif match["lang"] == "python" and not INCLUDE.search(match["text"]):
            start = text.count("\n", 0, match.start("text"))
            lines += [""] * (start - len(lines) - 1)
            lines += [f"print({_SEPARATOR!r}, end='')", *match["text"].splitlines()]
            count += 1
    return Program("\n".join(lines), expected)


def run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> str:
    """What a command of Python's prints in `folder`; raises when it fails."""
    done = run_python(*command, cwd=folder, env=env, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{command} failed\n{done.stdout}\n{done.stderr}")
    return done.stdout


def run_page(page: Path, folder: Path) -> list[str]:
    """What each block of a page prints; the program is left in `folder`, with the page's lines.

    Raises:
        ValueError: a block prints nothing though the page shows an output below it.
    """
    script = folder / f"{page.stem}.md.py"
    found = program(page.read_text(encoding="utf-8"))
    script.write_text(found.source, encoding="utf-8")
    env = dict(os.environ) if page in COMPILED else without_kernels()
    env["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [env.get("PYTHONPATH")]), str(FOR_DEVELOPERS)]
    )
    printed = run([script.name], folder, env).split(_SEPARATOR)[1:]
    for block in found.expected:
        if not printed[block].strip():
            raise ValueError(
                f"{page.name}: block {block} prints nothing, and an output is shown below it"
            )
    return printed


def without_kernels() -> dict[str, str]:
    """Environment variables under which what is printed does not depend on the processor."""
    return {**os.environ, "AO_PLUGINS": "float8,hf,optim,quant,sparsity"}


def normal(text: str) -> str:
    """Without what differs from run to run: times, and spaces at the ends of lines."""
    text = re.sub(r"\d+\.\d+ s\b", "… s", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _with_outputs(text: str, printed: list[str]) -> str:
    count = 0

    def fill(match: re.Match[str]) -> str:
        nonlocal count
        if match["mark"]:
            return f"{match['mark']}```text\n{printed[count - 1].strip()}\n```"
        count += match["lang"] == "python" and not INCLUDE.search(match["text"])
        return match[0]

    return BLOCK.sub(fill, text)


def main(pages: list[Path]) -> None:
    """Run the pages and write what they print into them."""
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            printed = run_page(page, Path(folder))
        page.write_text(_with_outputs(page.read_text(encoding="utf-8"), printed), encoding="utf-8")


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]])

"""Make examples/notebooks/*.ipynb from the examples that are in the percent format of jupytext.

With --check nothing is written, and the exit status says whether the notebooks are fresh. They have no
outputs: the scripts are what the tests run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from workspace import ROOT, finish

__all__ = ["main", "notebook", "scripts"]

EXAMPLES = ROOT / "examples"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def scripts(folder: Path = EXAMPLES) -> Iterator[Path]:
    """The examples that have cells."""
    for path in sorted(folder.glob("*.py")):
        if any(line.startswith("# %%") for line in path.read_text("utf-8").splitlines()):
            yield path


def notebook(text: str) -> str:
    """The notebook of a script, the same each time."""
    made: Any = jupytext.reads(text, fmt="py:percent")
    made.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        cell["source"] = cell["source"].strip("\n")  # scripts have two empty lines before functions
    nbformat.validate(made)
    return f"{nbformat.writes(made)}\n"


def main(folder: Path = EXAMPLES) -> int:
    """Write the notebooks; with --check, only say which are not fresh. One without a script goes."""
    check, home = "--check" in sys.argv[1:], folder / "notebooks"
    fresh = {
        home / f"{path.stem}.ipynb": notebook(path.read_text("utf-8")) for path in scripts(folder)
    }
    problems = []
    for path in sorted({*fresh, *home.glob("*.ipynb")}):
        if path.exists() and path in fresh and path.read_text("utf-8") == fresh[path]:
            continue
        if check:
            problems.append(
                f"{path.relative_to(folder)}: not fresh; run scripts/{Path(__file__).name}"
            )
        elif path in fresh:
            home.mkdir(exist_ok=True)
            path.write_text(fresh[path], "utf-8")
        else:
            path.unlink()
    return finish(problems, f"{len(fresh)} notebooks")


if __name__ == "__main__":
    sys.exit(main())

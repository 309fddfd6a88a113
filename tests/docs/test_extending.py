"""The pages under Extend: what a stranger is shown is all there, and goes through the public doors only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from run_docs import BLOCK

DOCS = Path(__file__).parents[2] / "docs"
#: what the page Extend ao shows: a heading, and a word of the code below it
SHOWN = {
    "A number format": "lut_dtype(",
    "A layout": "(Layout)",
    "A kernel": "Kernel(",
    "A kernel that fuses an input step": "fuses=",
    "An op": "Op(",
    "A scale method": "ScaleMethod(",
    "An algorithm": "Algorithm(",
    "An optimizer": "(torch.optim.Optimizer)",
    "A command": "ao_cli(",
}
SOURCES = {
    **{
        f"{page.relative_to(DOCS)}:{number}": match["text"]
        for page in sorted((DOCS / "extending").glob("*.md"))
        for number, match in enumerate(BLOCK.finditer(page.read_text("utf-8")))
        if match["lang"] == "python" and "--8<--" not in match["text"]
    },
    **{
        str(path.relative_to(DOCS)): path.read_text("utf-8")
        for path in sorted((DOCS / "examples").rglob("*.py"))
    },
}


@pytest.mark.parametrize("heading", SHOWN)
def test_each_is_shown_with_what_it_prints(heading: str) -> None:
    text = (DOCS / "extending" / "index.md").read_text("utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    code, output = list(BLOCK.finditer(section))
    assert code["lang"] == "python"
    assert SHOWN[heading] in code["text"]
    assert output["mark"], "marked as the output, which test_examples.py compares"


@pytest.mark.parametrize("source", SOURCES)
def test_only_the_public_doors_are_imported(source: str) -> None:
    names = {name for name in imported(SOURCES[source]) if name.startswith("ao_core.")}
    deep = {name for name in names if name.split(".")[1] not in ("ext", "testing")}
    assert not deep, f"{source}: ao_core, ao_core.ext and ao_core.testing are for everybody"


def imported(text: str) -> set[str]:
    """The modules that a program imports, or imports from."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_a_deep_import_is_seen() -> None:
    assert imported("import ao_core.tensor\nfrom ao_core.ext import Step") == {
        "ao_core.tensor",
        "ao_core.ext",
    }

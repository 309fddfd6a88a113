"""What the site promises its readers: a short front page, and results that say what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from run_docs import BLOCK

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TASKS = ["Start", "Quantize", "Fine-tune and train", "Hugging Face", "Sparsify",
         "Deploy and share", "Extend", "Results", "Reference"]  # fmt: skip


def navigation() -> dict[str, list[str]]:
    """Section of mkdocs.yml's navigation -> its pages."""
    _, _, text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if section := re.fullmatch(r"  - ([^:]+):", line):
            sections[section[1]] = []
        elif page := re.search(r"([\w/-]+\.md)$", line):
            sections[list(sections)[-1]].append(page[1])
    return sections


def test_navigation_is_by_task() -> None:
    assert list(navigation()) == TASKS


def test_every_page_is_in_the_navigation_once() -> None:
    listed = sorted(page for pages in navigation().values() for page in pages)
    assert listed == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", navigation()["Results"])
def test_results_begin_with_what_was_measured(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    begin = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S).strip().split("\n\n")
    assert begin[0].startswith("# ")
    # a paragraph of some sentences, not a table, a list or another heading
    assert re.match(r"[A-Z]", begin[1])
    assert len(re.findall(r"\w[.:;] ", begin[1])) >= 2


def test_front_page_shows_one_example_one_picture_and_five_reasons() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [m["lang"] for m in BLOCK.finditer(text)] == ["python", "text"]
    assert text.count("--8<--") == 1
    assert "docs/assets/size-speed.svg" in text
    reasons = text.partition("## Why ao\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- \*\*", reasons, re.M)) == 5
    table = text.partition("## What do you want to do?\n")[2]
    assert len(re.findall(r"^\| \w", table, re.M)) == 1 + len(TASKS)

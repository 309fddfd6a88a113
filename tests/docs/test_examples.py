"""The documentation's code runs, and what it says is printed is what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_docs import BLOCK, INCLUDE, PAGES, normal, program, run, run_page, without_kernels

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PROGRAMS = {page: program(page.read_text(encoding="utf-8")) for page in PAGES}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    output = run([str(path)], tmp_path, without_kernels())
    assert output.strip(), "an example prints what it shows"


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p, code in PROGRAMS.items() if code.source], ids=name_of)
def test_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path)
    for block, text in PROGRAMS[page].expected.items():
        assert normal(printed[block]) == normal(text)


def test_every_example_is_shown_in_a_page() -> None:
    shown = {name for page in PAGES for name in INCLUDE.findall(page.read_text(encoding="utf-8"))}
    assert {name_of(path) for path in EXAMPLES} <= shown
    assert all((ROOT / name).is_file() for name in shown)


def test_quickstart_of_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (quickstart,) = [m["text"] for m in BLOCK.finditer(text) if m["lang"] == "python"]
    code = [line for line in quickstart.splitlines() if line.strip()]
    assert 5 <= len(code) <= 10


def test_every_package_has_its_pages() -> None:
    for package in ROOT.glob("packages/*/pyproject.toml"):
        for folder in ("reference", "changelog"):
            page = ROOT / "docs" / folder / f"{package.parent.name}.md"
            assert page.is_file(), f"add {name_of(page)} and its line in mkdocs.yml"

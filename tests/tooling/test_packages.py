from __future__ import annotations

import subprocess
import sys

import pytest

from check_packages import expected_settings, shape_problems
from new_package import new_package
from workspace import packages


@pytest.mark.parametrize("folder", packages(), ids=lambda folder: folder.name)
def test_every_package_has_the_shape_of_the_template(folder):
    assert shape_problems(folder) == []


def test_a_new_package_has_the_shape_and_its_names_are_filled_in(workspace):
    folder = new_package("ao-low-bits", "Fewer bits.", workspace)
    assert shape_problems(folder, workspace) == []
    assert (folder / "src/ao_low_bits/plugin.py").is_file()
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "LICENSE":
            assert "NAME" not in path.read_text()
            assert "SUMMARY" not in path.read_text()
    assert 'low_bits = "ao_low_bits.plugin"' in (folder / "pyproject.toml").read_text()


def test_a_new_package_is_clean_under_ruff(package):
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", str(package)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["optim", "ao_optim", "ao-", "ao-Optim", "ao-../x"])
def test_a_bad_name_is_refused(workspace, name):
    with pytest.raises(ValueError, match="must be `ao-` and lowercase words"):
        new_package(name, "Summary.", workspace)


@pytest.mark.parametrize("summary", [" ", "two\nlines", 'a "quote"'])
def test_a_bad_summary_is_refused_and_nothing_is_written(workspace, summary):
    with pytest.raises(ValueError, match="must be one line"):
        new_package("ao-optim", summary, workspace)
    assert not (workspace / "packages/ao-optim").exists()


def test_an_existing_package_is_not_overwritten(workspace, package):
    before = (package / "README.md").read_text()
    with pytest.raises(FileExistsError):
        new_package("ao-demo", "Another.", workspace)
    assert (package / "README.md").read_text() == before


@pytest.mark.parametrize(
    ("place", "old", "new", "expected"),
    [
        ("pyproject.toml", '">=3.10"', '">=3.12"', "project.requires-python"),
        ("pyproject.toml", '"error"', '"default"', "tool.pytest"),
        ("pyproject.toml", 'name = "ao-demo"', 'name = "demo"', "project.name"),
        (
            "pyproject.toml",
            'test = ["ao-core[testing]"',
            'tests = ["ao-core[testing]"',
            "extra `test`",
        ),
        ("LICENSE", "BSD", "MIT", "LICENSE differs"),
    ],
)
def test_a_deviation_is_named(workspace, package, place, old, new, expected):
    path = package / place
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    problems = shape_problems(package, workspace)
    assert problems
    assert any(expected in problem for problem in problems)


@pytest.mark.parametrize("place", ["README.md", "src/ao_demo/py.typed", "changes/README.md"])
def test_a_missing_file_is_named(workspace, package, place):
    (package / place).unlink()
    assert shape_problems(package, workspace) == [f"ao-demo: {place} is missing"]


def test_a_package_that_compiles_has_another_backend_and_sources_in_its_settings(
    workspace, package
):
    (package / "CMakeLists.txt").write_text("")
    problems = shape_problems(package, workspace)
    assert [
        text.split(" is ")[0].removeprefix("ao-demo: pyproject.toml: ") for text in problems
    ] == [
        "build-system",
        "tool.hatch",
        "tool.scikit-build.sdist.include",
    ]
    assert "/csrc" in problems[-1]
    path = package / "pyproject.toml"
    before, rest = path.read_text().split("[tool.hatch.version]")
    before = before.replace('"hatchling>=1.27"', '"scikit-build-core>=1.1"')
    before = before.replace("hatchling.build", "scikit_build_core.build")
    included = [*expected_settings(package)["tool"]["scikit-build"]["sdist"]["include"]]
    after = rest[rest.index("[tool.ruff]") :]
    path.write_text(f"{before}[tool.scikit-build]\nsdist.include = {included}\n\n{after}")
    assert shape_problems(package, workspace) == []

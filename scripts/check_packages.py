"""Fail where a package in packages/ does not have the shape of scripts/template."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from workspace import ROOT, finish, load_toml, module_name, packages, parse_toml

TEMPLATE = Path(__file__).resolve().parent / "template"
#: keys of pyproject.toml on which all packages agree
COMMON_KEYS = (
    "build-system",
    "project.authors",
    "project.dynamic",
    "project.license",
    "project.license-files",
    "project.readme",
    "project.requires-python",
    "tool.hatch",
    "tool.pytest",
    "tool.ruff",
    "tool.scikit-build.sdist.include",
    "tool.towncrier",
)
#: where it is, a package compiles C++: another backend builds it than the template's
BUILD = "CMakeLists.txt"
COMPILED = {"requires": ["scikit-build-core>=1.1"], "build-backend": "scikit_build_core.build"}
#: where they are, the build or tests use them, so an sdist holds them: sources, what compiles them, a library
#: of checks, and shared fixtures
FOR_BUILD = ("LICENSE", "README.md", "pyproject.toml", "csrc", BUILD, "cmake")
FOR_TESTS = ("build_library.py", "cuda_build.py", "checks", "conftest.py")
FIRST_CHANGE = "changes/+first.feature.md"
#: pytest settings that only make sense in the workspace
WORKSPACE_ONLY = {"testpaths", "pythonpath"}


def fill(text: str, name: str) -> str:
    """A template's text or file name, for the package `ao-NAME`."""
    short = name.removeprefix("ao-").replace("-", "_")
    return text.replace("ao-NAME", name).replace("NAME", short)


def template_files(name: str) -> dict[str, Path]:
    """Path within the package → file of the template."""
    files = sorted(path for path in TEMPLATE.rglob("*") if path.is_file())
    found = {fill(path.relative_to(TEMPLATE).as_posix(), name): path for path in files}
    return {place: path for place, path in found.items() if "__pycache__" not in place}


def expected_settings(package: Path) -> dict[str, Any]:
    """The template's pyproject.toml for a package, with another backend where it compiles C++."""
    text = (TEMPLATE / "pyproject.toml").read_text(encoding="utf-8")
    settings = parse_toml(fill(text, package.name))
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    if (package / BUILD).is_file():
        del settings["tool"]["hatch"]
        settings["build-system"] = COMPILED
        settings["tool"]["scikit-build"] = {"sdist": {"include": included}}
        included += [f"/{name}" for name in FOR_BUILD]
    included += [f"/{name}" for name in FOR_TESTS if (package / name).exists()]
    return settings


def lookup(data: dict[str, Any], dotted: str) -> Any:
    """The value under a dotted key, None where there is none."""
    value: Any = data
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def shape_problems(package: Path, root: Path = ROOT) -> list[str]:
    """One sentence for each way in which the package differs from the template."""
    name = package.name
    module = module_name(package)
    # a package outgrows its first test and its first change; ao-core is not a plugin of itself
    optional = {"src/ao_core/plugin.py", f"tests/test_{module}_package.py", FIRST_CHANGE}
    problems = [
        f"{name}: {place} is missing"
        for place in template_files(name)
        if place not in optional and not (package / place).is_file()
    ]
    if not any(package.glob("tests/**/test_*.py")):
        problems.append(f"{name}: tests/ has no test_*.py")
    if not problems:
        problems += pyproject_problems(package, root)
        if (package / "LICENSE").read_bytes() != (root / "LICENSE").read_bytes():
            problems.append(f"{name}: LICENSE differs from the workspace's")
    return problems


def pyproject_problems(package: Path, root: Path) -> list[str]:
    """One sentence for each setting that must agree with the template or the workspace."""
    name = package.name
    ours = load_toml(package / "pyproject.toml")
    theirs = expected_settings(package)
    problems = [
        f"{name}: pyproject.toml: {key} is {lookup(ours, key)!r}, expected {lookup(theirs, key)!r}"
        for key in COMMON_KEYS
        if lookup(ours, key) != lookup(theirs, key)
    ]
    if lookup(ours, "project.name") != name:
        problems.append(f"{name}: pyproject.toml: project.name must be the folder's name")
    if not lookup(ours, "project.optional-dependencies.test"):
        problems.append(f"{name}: pyproject.toml: the extra `test` is missing")
    shared = load_toml(root / "pyproject.toml")["tool"]["pytest"]["ini_options"]
    shared = {key: value for key, value in shared.items() if key not in WORKSPACE_ONLY}
    own = lookup(ours, "tool.pytest.ini_options") or {}
    if {key: value for key, value in own.items() if key not in WORKSPACE_ONLY} != shared:
        problems.append(f"{name}: [tool.pytest.ini_options] differs from the workspace's")
    return problems


if __name__ == "__main__":
    folders = packages()
    found = [problem for folder in folders for problem in shape_problems(folder)]
    sys.exit(finish(found, f"shape of {len(folders)} packages"))

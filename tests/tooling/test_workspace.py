"""The lists that people keep by hand agree with each other."""

from __future__ import annotations

import ast
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workspace import ROOT, load_toml, packages


def sessions():
    """The names of the nox sessions."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        node.name
        for node in functions
        if any("nox.session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_contributing_lists_every_session():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sessions()


def test_ci_runs_the_sessions_that_the_project_asks_for():
    commands = re.findall(r"nox -s ([a-z_ ]+)", (ROOT / ".ci/run").read_text())
    named = {name for command in commands for name in command.split()}
    assert named <= sessions()
    assert {"tests", "lint", "types", "imports", "docs"} <= named


def test_every_direct_requirement_is_pinned():
    groups = load_toml(ROOT / "pyproject.toml")["dependency-groups"].values()
    lines = [line for group in groups for line in group if isinstance(line, str)]
    for package in packages():
        data = load_toml(package / "pyproject.toml")
        lines += [*data["project"]["dependencies"], *data["build-system"]["requires"]]
        lines += [
            line for extra in data["project"]["optional-dependencies"].values() for line in extra
        ]
    wanted = {canonicalize_name(Requirement(line).name) for line in lines}
    pinned = {
        canonicalize_name(Requirement(line).name): str(Requirement(line).specifier)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    # torch's builds for CUDA pin Triton themselves, each another release
    assert wanted - set(pinned) - {"triton"} <= {package.name for package in packages()}
    assert pinned["torch"] == "==2.13.0"
    assert all(re.fullmatch(r"==[\w.]+", version) for version in pinned.values())

"""A small workspace with one generated package, under git, for the scripts to work on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from new_package import new_package
from workspace import ROOT, git


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A repository that holds only packages/ao-demo, version 0.1.0, with one commit."""
    root = tmp_path / "workspace"
    root.mkdir()
    for name in ("LICENSE", "pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    new_package("ao-demo", "Shows what a package looks like.", root)
    git("init", "--quiet", "--initial-branch", "main", root=root)
    git("config", "user.name", "A Tester", root=root)
    git("config", "user.email", "tester@ao.invalid", root=root)
    commit_all(root, "Start")
    return root


@pytest.fixture
def package(workspace: Path) -> Path:
    """The folder of the workspace's package."""
    return workspace / "packages" / "ao-demo"


def commit_all(root: Path, message: str) -> None:
    """Commit everything in a repository."""
    git("add", "--all", root=root)
    git("commit", "--quiet", "--message", message, root=root)


@pytest.fixture
def commit():
    """The function `commit(root, message)`."""
    return commit_all

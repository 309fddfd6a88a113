from __future__ import annotations

import pytest

from check_sizes import LIMIT, too_long
from check_texts import forbidden_texts
from workspace import finish, project_files


def write(folder, text, name="file.py"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_sizes_at_the_limit_and_above(tmp_path):
    fits = write(tmp_path, "x\n" * LIMIT, "fits.py")
    long = write(tmp_path, "x\n" * (LIMIT + 1), "long.py")
    (problem,) = too_long([fits, long], tmp_path)
    assert problem == f"long.py: {LIMIT + 1} lines, at most {LIMIT} are allowed"


# put together from pieces, so that this file does not contain them
MACHINE_PATHS = [
    "/" + path for path in ("home/me/x", "opt/tool", "tmp/model", "Users/me", "root/x")
]
HOSTS = [
    "https://" + ".".join(parts) for parts in (("pypi", "org"), ("files", "pythonhosted", "org"))
]


@pytest.mark.parametrize("text", [*MACHINE_PATHS, *HOSTS])
def test_forbidden_texts_are_found_with_their_place(tmp_path, text):
    path = write(tmp_path, f"first\nsee {text} there\n")
    (problem,) = forbidden_texts([path], tmp_path)
    assert problem.startswith("file.py:2: ")


@pytest.mark.parametrize(
    "text",
    ["#!/usr/bin/env python", "packages/home/x", "https://pytorch.org/docs", "a/tmp/b", "../opt/x"],
)
def test_other_texts_pass(tmp_path, text):
    assert forbidden_texts([write(tmp_path, text)], tmp_path) == []


def test_binary_files_are_passed_over(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\xfe" + MACHINE_PATHS[0].encode())
    assert forbidden_texts([path], tmp_path) == []


def test_project_files_are_those_git_would_track(workspace):
    write(workspace, "x", "new.py")
    write(workspace, "x", "gone.pyc")
    names = {path.name for path in project_files("*.py", "*.pyc", root=workspace)}
    assert {"new.py", "__init__.py", "plugin.py"} <= names
    assert "gone.pyc" not in names


def test_finish_reports_and_gives_the_exit_status(capsys):
    assert finish([], "shape of 2 packages") == 0
    assert finish(["a: wrong", "b: wrong"], "shape of 2 packages") == 1
    output = capsys.readouterr()
    assert output.out.splitlines() == ["shape of 2 packages: ok", "2 problems"]
    assert output.err.splitlines() == ["a: wrong", "b: wrong"]

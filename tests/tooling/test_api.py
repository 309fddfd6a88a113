from __future__ import annotations

import pytest

from check_api import api_problems
from workspace import git, last_tag


@pytest.fixture
def tagged(workspace, package, commit):
    """The workspace's package with one public function, tagged as 0.1.0."""
    (package / "src/ao_demo/things.py").write_text('def area(width, height):\n    """Area."""\n')
    commit(workspace, "A function")
    git("tag", "ao-demo-v0.1.0", root=workspace)
    return package


def test_without_a_tag_there_is_nothing_to_compare(workspace, package, capsys):
    assert api_problems(package, workspace) == []
    assert "no tag ao-demo-v* yet" in capsys.readouterr().out


def test_an_addition_is_no_break(workspace, tagged, capsys):
    path = tagged / "src/ao_demo/things.py"
    path.write_text(path.read_text() + '\n\ndef volume(x):\n    """Volume."""\n')
    assert api_problems(tagged, workspace) == []
    assert "0 breaks since ao-demo-v0.1.0" in capsys.readouterr().out


def test_a_break_is_a_problem_until_a_fragment_announces_it(workspace, tagged):
    (tagged / "src/ao_demo/things.py").write_text('def area(width):\n    """Area."""\n')
    (problem,) = api_problems(tagged, workspace)
    assert "height" in problem
    assert "changes/+WHAT.removal.md" in problem
    (tagged / "changes/+area.removal.md").write_text("`area` takes squares only.\n")
    assert api_problems(tagged, workspace) == []


def test_the_last_tag_is_the_newest_version_of_that_package(workspace):
    for tag in ("ao-demo-v0.9.0", "ao-demo-v0.10.0", "ao-demo-v0.10.0rc1", "ao-other-v3.0.0"):
        git("tag", tag, root=workspace)
    assert last_tag("ao-demo", workspace) == "ao-demo-v0.10.0"
    assert last_tag("ao-de", workspace) is None

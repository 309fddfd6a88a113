from __future__ import annotations

import pytest

from release import ReleaseError, release
from workspace import git, read_version


def snapshot(root):
    """All that a release could change in a repository."""
    return git("show-ref", root=root), git("status", "--porcelain", root=root)


def test_a_rehearsal_does_everything_and_leaves_the_work_tree_as_it_was(workspace, package, capsys):
    before = snapshot(workspace)
    assert release("ao-demo", "0.2.0", root=workspace) == "ao-demo-v0.2.0"
    output = capsys.readouterr().out
    assert "Release ao-demo 0.2.0" in output
    assert "ao_demo-0.2.0-py3-none-any.whl" in output
    assert "ao_demo-0.2.0.tar.gz" in output
    assert snapshot(workspace) == before
    assert read_version(package) == "0.1.0"
    assert not (workspace / "dist").exists()


def test_execute_commits_tags_and_hands_over_the_distributions(workspace, package):
    tag = release("ao-demo", "0.2.0", root=workspace, execute=True)
    assert git("rev-parse", f"{tag}^{{commit}}", root=workspace) == git(
        "rev-parse", "HEAD", root=workspace
    )
    assert git("log", "-1", "--format=%an %s", root=workspace) == "A Tester Release ao-demo 0.2.0"
    assert git("status", "--porcelain", root=workspace) == ""
    assert read_version(package) == "0.2.0"
    changelog = (package / "CHANGELOG.md").read_text()
    assert "## 0.2.0 (" in changelog
    assert "- First version." in changelog
    assert [path.name for path in (package / "changes").iterdir()] == ["README.md"]
    names = sorted(path.name for path in (workspace / "dist").iterdir())
    assert names == ["ao_demo-0.2.0-py3-none-any.whl", "ao_demo-0.2.0.tar.gz"]


def test_the_next_release_needs_a_newer_version_and_a_change(workspace, package, commit):
    release("ao-demo", "0.1.0", root=workspace, execute=True)
    with pytest.raises(ReleaseError, match="not newer than the last tag, ao-demo-v0.1.0"):
        release("ao-demo", "0.1.0", root=workspace)
    with pytest.raises(ReleaseError, match="no fragment"):
        release("ao-demo", "0.1.1", root=workspace)
    (package / "changes/+crash.bugfix.md").write_text("No crash on empty input.\n")
    commit(workspace, "Fix a crash")
    release("ao-demo", "0.1.1", root=workspace, execute=True)
    changelog = (package / "CHANGELOG.md").read_text()
    assert changelog.index("## 0.1.1") < changelog.index("## 0.1.0")


@pytest.mark.parametrize(
    ("name", "version", "reason"),
    [
        ("ao-dmeo", "0.2.0", "known: ao-demo"),
        ("ao-demo", "two", "not a version such as"),
        ("ao-demo", "0.2.0-rc1", "write it as 0.2.0rc1"),
        ("ao-demo", "0.0.9", "older than the source's 0.1.0"),
    ],
)
def test_bad_arguments_are_refused(workspace, name, version, reason):
    with pytest.raises(ReleaseError, match=reason):
        release(name, version, root=workspace)


def test_uncommitted_changes_are_refused(workspace, package):
    (package / "README.md").write_text("changed")
    with pytest.raises(ReleaseError, match="commit them first"):
        release("ao-demo", "0.2.0", root=workspace)


def test_a_distribution_that_does_not_pass_its_check_stops_the_release(workspace, package, commit):
    (package / "src/ao_demo/py.typed").unlink()
    commit(workspace, "Lose the marker")
    before = snapshot(workspace)
    with pytest.raises(ReleaseError, match=r"py\.typed is missing"):
        release("ao-demo", "0.2.0", root=workspace, execute=True)
    assert snapshot(workspace) == before

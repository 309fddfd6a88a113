"""`ao replay` in this process; replays in new processes are in the tests of the recipes."""

from __future__ import annotations


def test_the_command(ao, source, tmp_path):
    ao("quantize", source, tmp_path / "out", "--config", "small4")
    result = ao("replay", tmp_path / "out", source, tmp_path / "again")
    assert result.exit_code == 0, result.output
    assert "have the bytes" in result.stdout
    other = ao("replay", tmp_path / "out", tmp_path / "out", tmp_path / "third")
    assert (other.exit_code, "differs: in SRC" in other.stdout) == (1, True)

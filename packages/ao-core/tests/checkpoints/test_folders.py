"""What a library says of a folder is written beside the weights, and nothing else is touched."""

from pathlib import Path

import pytest

from ao_core import FolderKind, Report, WeightOnlyConfig
from ao_core.checkpoints import quantize_checkpoint, verify_checkpoint
from ao_core.checkpoints.folders import find, hints
from ao_core.errors import CheckpointError
from ao_core.registry import registry


@pytest.fixture
def kind(monkeypatch, source):
    """A kind of folder that no other test sees."""
    brought = source
    made = FolderKind(
        "notes",
        recognizes=lambda folder: (folder / "notes.txt").exists(),
        refuses=lambda folder: "its notes say no" if (folder / "no.txt").exists() else None,
        files=lambda src, copy, report: {
            "notes.txt": (copy / "notes.txt").read_text() + report.config["name"],
            "more.txt": f"{src.name}: {len(report.records)} records",
        },
        hint=lambda folder: f"read {folder.name}",
        fetch=lambda name: None if name == "nothing" else brought,
    )
    table = registry.folder_kinds
    monkeypatch.setattr(table, "names", lambda: ["notes"])
    monkeypatch.setattr(table, "get", lambda name: made)
    return made


def test_files_change_in_the_copy_and_the_manifest_knows_it(source, tmp_path, kind):
    (source / "notes.txt").write_text("weights in ")
    quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert (source / "notes.txt").read_text() == "weights in "
    assert (tmp_path / "out" / "notes.txt").read_text() == "weights in weight_only"
    report = Report.from_json((tmp_path / "out" / "ao_report.json").read_text())
    assert (tmp_path / "out" / "more.txt").read_text() == f"source: {len(report.records)} records"
    verified = verify_checkpoint(tmp_path / "out")
    assert not any(file.problem for file in verified)
    assert {"notes.txt", "more.txt"} <= {file.name for file in verified}
    assert hints(tmp_path / "out") == ["read out"]


def test_a_folder_may_be_refused_before_anything_is_written(source, tmp_path, kind):
    (source / "notes.txt").write_text("")
    (source / "no.txt").write_text("")
    with pytest.raises(CheckpointError, match="its notes say no"):
        quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert not (tmp_path / "out").exists()


def test_a_name_may_stand_for_a_folder_elsewhere_unless_there_is_a_file(source, tmp_path, kind):
    assert find(tmp_path / "published") == source
    assert find(source / "config.json") == source / "config.json"
    assert find(Path("nothing")) == Path("nothing")


def test_a_folder_of_another_library_stays_as_it_is(source, tmp_path, kind):
    quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert not (tmp_path / "out" / "more.txt").exists()

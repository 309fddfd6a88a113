"""What a library says of a folder is written beside the weights, and nothing else is touched."""

import pytest

from ao_core import FolderKind, WeightOnlyConfig
from ao_core.checkpoints import quantize_checkpoint, verify_checkpoint
from ao_core.checkpoints.folders import hints
from ao_core.errors import CheckpointError
from ao_core.registry import registry


@pytest.fixture
def kind(monkeypatch):
    """A kind of folder that no other test sees."""
    made = FolderKind(
        "notes",
        recognizes=lambda folder: (folder / "notes.txt").exists(),
        refuses=lambda folder: "its notes say no" if (folder / "no.txt").exists() else None,
        files=lambda folder, config: {
            "notes.txt": (folder / "notes.txt").read_text() + config["name"],
            "other.txt": "not of the source",
        },
        hint=lambda folder: f"read {folder.name}",
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
    assert not (tmp_path / "out" / "other.txt").exists()
    assert not any(file.problem for file in verify_checkpoint(tmp_path / "out"))
    assert hints(tmp_path / "out") == ["read out"]


def test_a_folder_may_be_refused_before_anything_is_written(source, tmp_path, kind):
    (source / "notes.txt").write_text("")
    (source / "no.txt").write_text("")
    with pytest.raises(CheckpointError, match="its notes say no"):
        quantize_checkpoint(source, tmp_path / "out", WeightOnlyConfig("int8"))
    assert not (tmp_path / "out").exists()

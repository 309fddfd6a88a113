"""What is read of a folder of sources, and what of it is held out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bytelm import data


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of 60 files, and some that are not to be read."""
    for number in range(60):
        path = tmp_path / f"part{number % 3}" / f"file{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"number = {number}  # ä\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("ä".encode("latin-1"))
    (tmp_path / "nul.py").write_bytes(b"a\0b")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "other.txt").write_text("other", encoding="utf-8")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("import this", encoding="utf-8")
    return tmp_path


def texts(stream: torch.Tensor) -> list[str]:
    first, *found = stream.numpy().tobytes().split(data.SEPARATOR)
    assert first == b""  # a separator stands before every file
    return [text.decode() for text in found]


def test_every_file_is_in_one_part_by_its_name(root: Path) -> None:
    corpus = data.read_corpus(root)
    train, held_out = texts(corpus.train), texts(corpus.held_out)
    assert sorted(train + held_out) == sorted(f"number = {n}  # ä\n" for n in range(60))
    expected = {n for n in range(60) if data.is_held_out(f"part{n % 3}/file{n}.py")}
    assert set(held_out) == {f"number = {n}  # ä\n" for n in expected}
    assert 0 < len(held_out) < 10


def test_about(root: Path) -> None:
    corpus = data.read_corpus(root)
    about = corpus.about
    assert about["files"] + about["held_out_files"] == 60
    assert (about["bytes"], about["held_out_bytes"]) == (len(corpus.train), len(corpus.held_out))
    assert about["python"] is None
    assert data.read_corpus(root).about == about
    (root / "part0" / "file0.py").write_text("number = 1  # ä\n", encoding="utf-8")
    assert data.read_corpus(root).about["sha256"] != about["sha256"]


def test_nothing_to_hold_out(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("1", encoding="utf-8")
    with pytest.raises(ValueError, match="too few Python files"):
        data.read_corpus(tmp_path)


def test_one_name_in_twenty_is_held_out() -> None:
    share = sum(data.is_held_out(f"folder/{n}.py") for n in range(20_000)) / 20_000
    # one in 20 of 256 values of a byte: 13 / 256
    assert abs(share - 13 / 256) < 0.006


def test_samples_depend_on_the_generator_alone() -> None:
    stream = torch.arange(100, dtype=torch.uint8)
    first, again = (data.sample(stream, 64, 9, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == (64, 9)
    assert torch.equal(first, first[:, :1] + torch.arange(9))
    assert first[:, 0].unique().numel() > 30


def test_samples_reach_both_ends() -> None:
    found = data.sample(torch.arange(5), 200, 3, torch.Generator().manual_seed(0))
    assert found[:, 0].unique().tolist() == [0, 1, 2]

"""Tensors in files, and memory that was freed and goes back to the system."""

import platform
from pathlib import Path

import pytest
import torch

from ao_core.mapped import give_back, mapped_from, spilled, spilling


def own() -> int:
    """Bytes of the process that are no mapped file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing")
def test_what_lies_between_tensors_that_stay():
    del_me = torch.ones(1 << 22)  # once 16 MB were freed, what is smaller comes from the heap
    del del_me
    tensors = [torch.ones(1 << 18) for _ in range(64)]
    kept = tensors[::2]
    del tensors
    before = own()
    give_back()
    assert before - own() > 24 << 20  # of 32 MiB
    assert all(bool((tensor == 1).all()) for tensor in kept)


def test_without_such_a_call(monkeypatch):
    monkeypatch.setattr("ao_core.mapped._trim", lambda: None)
    give_back()


def test_tensors_in_files_that_have_no_name(tmp_path):
    small, large = torch.randn(16), torch.randn(1200, 512).bfloat16()
    assert spilled(large) is large
    with spilling(tmp_path):
        assert spilled(small) is small
        found = spilled(large.t())
    assert torch.equal(found, large.t())
    assert found.data_ptr() != large.data_ptr()
    assert spilled(large) is large
    if platform.system() == "Linux":
        assert not list(tmp_path.iterdir())


def test_what_a_file_has_is_mapped_and_never_written(tmp_path):
    path, values = tmp_path / "file", torch.arange(12, dtype=torch.int16)
    path.write_bytes(b"head" + values.numpy().tobytes())
    found = mapped_from(path, 4, torch.int16, (3, 4))
    assert torch.equal(found, values.view(3, 4))
    found.zero_()
    assert torch.equal(mapped_from(path, 4, torch.int16, (12,)), values)
    assert mapped_from(path, 2, torch.float32, (1,)) is None

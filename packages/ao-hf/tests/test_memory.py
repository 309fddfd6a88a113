"""Memory that was freed goes back to the system."""

import platform
from pathlib import Path

import pytest
import torch

from ao_hf.memory import give_back


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
    monkeypatch.setattr("ao_hf.memory._trim", lambda: None)
    give_back()

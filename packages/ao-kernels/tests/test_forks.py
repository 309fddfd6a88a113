"""Forks: children of a process that has used the kernels, or has not, compute right and with threads."""

from __future__ import annotations

import os
import sys

import pytest

from ao_core.testing.warm import run_python

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork") or not sys.platform.startswith("linux"),
    reason="counts threads in /proc",
)

#: a server that loads its model and forks its workers: what the parent has run before differs
PROGRAM = """
import os, signal, sys, threading, torch
import torch.nn.functional as F
from ao_core import Spec, quantize_tensor
from ao_core.ext import repack
from ao_kernels.cpu.library import load

def threads():
    return len(os.listdir("/proc/self/task"))

def matmul(m):
    return F.linear(x[:m], w)

torch.set_num_threads(3)
load()
w = repack(quantize_tensor(torch.randn(256, 512), Spec("int4", (1, 32), layout="packed")))
x = torch.randn(600, 512)
before = sys.argv[1]
if before == "torch":
    torch.randn(700, 700) @ torch.randn(700, 700)
if before == "ao":
    matmul(600)

def child(depth):
    signal.alarm(60)  # a hang is a death
    start = threads()
    found = [matmul(m) for m in (1, 8, 600)]
    used = threads() - start
    other = []
    worker = threading.Thread(target=lambda: other.append(matmul(600)))
    worker.start()
    worker.join()
    torch.save((found, used, other), sys.argv[2] + str(depth))
    if depth == 0:
        inner = os.fork()
        if inner == 0:
            child(1)
        assert os.waitpid(inner, 0)[1] == 0
    os._exit(0)

pid = os.fork()
if pid == 0:
    child(0)
assert os.waitpid(pid, 0)[1] == 0
expected = [matmul(m) for m in (1, 8, 600)]
for depth in (0, 1):
    found, used, other = torch.load(sys.argv[2] + str(depth))
    assert all(map(torch.equal, found, expected)), depth
    assert torch.equal(other[0], expected[2]), depth
    print(used)
"""


@pytest.mark.parametrize("before", ["nothing", "torch", "ao"])
def test_children_are_right_and_have_threads(before: str, tmp_path: os.PathLike[str]) -> None:
    """A child, and a child of it: its first matmul starts as many threads as torch has."""
    done = run_python("-c", PROGRAM, before, f"{tmp_path}/found", timeout=120)
    assert done.returncode == 0, done.stderr
    used = [int(line) for line in done.stdout.split()]
    assert all(count >= 2 for count in used), used

"""Threads and processes: the same bits for any number of them, torch's pool, forks, calls at once."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import repack
from ao_core.testing.warm import run_python

ROW = (1, WHOLE)
SPECS = {
    "int4": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "uint4": Spec("uint4", (1, 128), "bfloat16", "int", "packed"),
    "nf4": Spec("nf4", (1, 64), layout="packed"),
    "int8": Spec("int8", ROW),
    "f8e4m3": Spec("f8e4m3", ROW),
    "int8-dynamic": Spec("int8", ROW, act=Spec("int8", ROW)),
    "int4-dynamic": Spec(
        "int4", (1, 32), layout="packed", act=Spec("uint8", ROW, zero_point="int")
    ),
}
#: far more work than what one thread does alone, and no multiple of anything
N, K = 1000, 1504


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weight(name: str) -> QTensor:
    w = repack(quantize_tensor(randn(N, K), SPECS[name]))
    assert w.spec.layout.startswith("cpu_tiles")
    return w


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever a test sets, the number of threads is afterwards as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_same_bits_for_any_number_of_threads(name: str, dtype: torch.dtype) -> None:
    w = weight(name)
    for m in (1, 2, 4, 5, 33, 300):
        x, found = randn(m, K).to(dtype), []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(F.linear(x, w))
        assert all(torch.equal(other, found[0]) for other in found[1:]), m


@pytest.mark.usefixtures("threads")
def test_packing_gives_the_same_bits_for_any_number_of_threads() -> None:
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(weight("int4-dynamic"))
    for name in found[0].part_names:
        assert all(torch.equal(getattr(other, name), getattr(found[0], name)) for other in found)


PROGRAM = """
import os, torch
import torch.nn.functional as F
from ao_core import Spec, quantize_tensor
from ao_core.ext import repack
torch.set_num_threads({before})
w = repack(quantize_tensor(torch.randn(1024, 1024), Spec("int4", (1, 32), layout="packed")))
assert w.spec.layout == "cpu_tiles"
for m in (1, 8, 64):
    F.linear(torch.randn(m, 1024), w)
torch.set_num_threads({after})
start = len(os.listdir("/proc/self/task"))
for m in (1, 8, 64):
    F.linear(torch.randn(m, 1024), w)
print(start, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize(("before", "after", "more"), [(1, 1, 0), (1, 4, 3), (4, 4, 0)])
def test_uses_the_pool_of_torch_with_its_number_of_threads(
    before: int, after: int, more: int
) -> None:
    done = run_python("-c", PROGRAM.format(before=before, after=after), check=True)
    start, end = map(int, done.stdout.split())
    assert end - start == more


def test_calls_from_several_threads_at_once() -> None:
    weights = {name: weight(name) for name in SPECS}
    inputs = {m: randn(m, K) for m in (1, 3, 40)}
    expected = {(n, m): F.linear(x, w) for n, w in weights.items() for m, x in inputs.items()}
    wrong: list[tuple[str, int]] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for _ in range(5):
            order = sorted(expected, key=lambda key: hash((number, key)))
            for name, m in order:
                if not torch.equal(F.linear(inputs[m], weights[name]), expected[name, m]):
                    wrong.append((name, m))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_first_calls_from_several_threads_at_once() -> None:
    """The first matmul of a weight, which others may be asking for at the same time."""
    x = randn(2, K)
    expected = F.linear(x, weight("int4"))
    for _ in range(20):
        w, outs, start = weight("int4"), [], threading.Barrier(4)

        def work(w: QTensor, outs: list[Tensor], start: threading.Barrier) -> None:
            start.wait()
            outs.append(F.linear(x, w))

        workers = [threading.Thread(target=work, args=(w, outs, start)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(outs) == 4
        assert all(torch.equal(out, expected) for out in outs)


FORK = """
import multiprocessing, torch
import torch.nn.functional as F
from ao_core import Spec, quantize_tensor
from ao_core.ext import repack

# comparing so few results starts no threads of torch, which does not survive a fork either
def child(queue, w, x, expected):
    torch.set_num_threads({child})
    queue.put(all(torch.equal(F.linear(a, w), b) for a, b in zip(x, expected)))

torch.set_num_threads({parent})
w = repack(quantize_tensor(torch.randn(256, 4096), Spec("int4", (1, 32), layout="packed")))
assert w.spec.layout == "cpu_tiles"
x = [torch.randn(m, 4096) for m in (1, 8, 64)]
expected = [F.linear(a, w) for a in x]
context = multiprocessing.get_context("fork")
queue = context.Queue()
workers = [context.Process(target=child, args=(queue, w, x, expected), daemon=True) for _ in range(2)]
for worker in workers:
    worker.start()
print(all(queue.get(timeout=60) for _ in workers))
for worker in workers:
    worker.join()
assert all(torch.equal(F.linear(a, w), b) for a, b in zip(x, expected))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("parent", "child"), [(2, 1), (2, 2), (1, 2), (3, 2)])
def test_forks_of_a_process_that_has_used_the_kernels(parent: int, child: int) -> None:
    """The threads of the parent are gone in a child; whoever waits for them waits for ever."""
    done = run_python("-c", FORK.format(parent=parent, child=child))
    assert done.stdout == "True\n", done.stderr

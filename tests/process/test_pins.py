"""`kernels(band)` pins where it is entered: not in other threads and processes, nor in compiled code."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from ao_core import WHOLE, Kernel, QTensor, Spec, kernels, quantize_tensor
from ao_core.ext import UnsupportedOp
from ao_core.ext.kernels import pinned_band
from ao_core.testing.registered import registered
from ao_core.testing.warm import run_python

ROUNDS = 200


def _answering(value: float) -> Callable[..., torch.Tensor]:
    return lambda x, w, bias: x.new_full((*x.shape[:-1], w.shape[0]), value)


#: matmuls that say which kernel made them, each the best of its band
ANSWERS = {"reference": 1.0, "torch": 2.0, None: 2.0}
KERNELS = tuple(
    Kernel(f"answers_{value}", "linear", "plain", "cpu", _answering(value), priority)
    for value, priority in ((1.0, -1), (2.0, 49))
)
SPEC = Spec("int8", (1, WHOLE), layout="plain")


@pytest.fixture
def weight() -> Iterator[QTensor]:
    with registered(*KERNELS):
        yield quantize_tensor(torch.ones(4, 8), SPEC)


def answers(weight: QTensor, rounds: int = ROUNDS) -> set[float]:
    """What matmuls give, again and again."""
    x = torch.ones(1, 8)
    return {float(F.linear(x, weight)[0, 0]) for _ in range(rounds)}


def test_threads_with_different_pins_at_the_same_time(weight: QTensor) -> None:
    together = threading.Barrier(6)

    def work(band: str | None) -> set[float]:
        together.wait()
        if band is None:
            return answers(weight)
        found = set()
        for _ in range(20):  # entering and leaving is what others might notice
            with kernels(band):
                found |= answers(weight, ROUNDS // 20)
        return found

    bands = ["reference", "torch", None] * 2
    with ThreadPoolExecutor(len(bands)) as pool:
        assert list(pool.map(work, bands)) == [{ANSWERS[band]} for band in bands]


def test_a_pin_without_kernels_refuses_here_alone(weight: QTensor) -> None:
    """Of a band that nobody has on this machine: an error here, and nothing elsewhere."""
    with ThreadPoolExecutor(1) as pool, kernels("cuda"):
        with pytest.raises(UnsupportedOp, match="pinned to 'cuda'"):
            F.linear(torch.ones(1, 8), weight)
        assert pool.submit(pinned_band).result() is None
        assert pool.submit(answers, weight).result() == {2.0}


def test_tasks_inherit_and_keep_theirs(weight: QTensor) -> None:
    async def inner(band: str | None) -> set[float]:
        found = set()
        for _ in range(20):
            if band is None:
                found |= answers(weight, 5)
                await asyncio.sleep(0)
            else:
                with kernels(band):
                    await asyncio.sleep(0)
                    found |= answers(weight, 5)
        return found

    async def main() -> list[set[float]]:
        with kernels("reference"):
            pinned = [asyncio.create_task(inner(band)) for band in (None, "torch")]
            thread = asyncio.create_task(asyncio.to_thread(answers, weight))
        found = await asyncio.gather(inner(None), *pinned, thread)
        assert pinned_band() is None
        return found

    # outside; a task started under the pin, and one that pins otherwise; a thread of asyncio, which inherits
    assert asyncio.run(main()) == [{2.0}, {1.0}, {2.0}, {1.0}]


def test_compiled_code_keeps_what_it_was_compiled_with(weight: QTensor) -> None:
    def matmul(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    x = torch.ones(1, 8)
    plain = torch.compile(matmul, backend="aot_eager", fullgraph=True)
    assert float(plain(x)[0, 0]) == 2.0
    with kernels("reference"):
        assert float(matmul(x)[0, 0]) == 1.0
        assert float(plain(x)[0, 0]) == 2.0
        torch.compiler.reset()
        pinned = torch.compile(matmul, backend="aot_eager", fullgraph=True)
        assert float(pinned(x)[0, 0]) == 1.0
    assert float(pinned(x)[0, 0]) == 1.0
    torch.compiler.reset()


CHILDREN = """
import multiprocessing, os, sys
from ao_core import kernels
from ao_core.ext.kernels import pinned_band

def tell(pipe):
    with kernels("torch"):
        inner = pinned_band()
    pipe.send((pinned_band(), inner))

def ask(method):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=tell, args=(there,))
    child.start()
    found = here.recv()
    child.join()
    assert child.exitcode == 0
    return found

if __name__ == "__main__":
    with kernels("reference"):
        found = [ask(method) for method in ("fork", "spawn")]
        assert pinned_band() == "reference"
    assert pinned_band() is None
    print(found)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_processes(tmp_path) -> None:
    """A fork is a copy of what it was forked in; a spawned process begins without pins."""
    (tmp_path / "children.py").write_text(CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "AO_KERNELS"}
    done = run_python(tmp_path / "children.py", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('reference', 'torch'), (None, 'torch')]"

"""What every part of the benchmark measures with: contenders, their turns, and the lines of results."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor
from ao_kernels.triton.shared import workspace

#: one line of the results: what was measured, of whom, and the figures
Line = dict[str, Any]
#: a call that runs once, and gives seconds
Timed = Callable[[], float]


@dataclass(frozen=True)
class Setup:
    """Where and how much is measured."""

    device: str = "cuda"
    #: little of everything, so that a machine without a GPU goes through it
    tiny: bool = False
    #: bytes that the copies of what a contender reads fill, so that no cache holds them
    rotation: float = 400e6
    rounds: int = 20
    #: bytes read and written per second by `copy_` in this process
    bandwidth: float = 1.0

    def count(self, size: float) -> int:
        """How many things of `size` bytes fill the rotation."""
        return 1 + int(self.rotation // size)

    def copies(self, one: Any, size: float) -> list[Any]:
        """A thing of `size` bytes, and as many copies as fill the rotation."""
        return [one, *(copy.deepcopy(one) for _ in range(self.count(size) - 1))]

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Case:
    """Something that is begun, or left out, as a whole."""

    name: str
    run: Callable[[], Iterator[Line]]


@dataclass
class Contender:
    """One way to compute: what is called for each copy of what it reads."""

    copies: list[Any]
    call: Callable[[Tensor, Any], Any]
    #: bytes that one call must at least read and write; 0 where that is not what bounds it
    size: int = 0
    #: what serves it, where that is a choice that depends on the input
    kernel: Callable[[Tensor], str] = lambda x: ""
    #: (input, result of the first copy) -> its error, which must be less than the bound; None: random codes
    error: Callable[[Tensor, Any], float] | None = None
    bound: float = 1e-2


@dataclass
class Field:
    """Those who are there, and reasons of those who are not."""

    contenders: dict[str, Contender] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


Makers = Mapping[str, Callable[[], Contender]]


def built(makers: Makers) -> Field:
    """Everyone who can be made: one that cannot does not take the others with it."""
    found = Field()
    for name, make in makers.items():
        try:
            found.contenders[name] = make()
        except Exception as error:  # of any library
            found.failed[name] = told(error)
    return found


def told(error: Exception) -> str:
    """One line about an error; a device that is lost is not survived."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:300]


def recorded(contender: Contender, x: Tensor, *, apart: bool = False) -> Timed:
    """A CUDA graph of a call for every copy: seconds of one; `apart`, with a plain kernel before each."""
    if not x.is_cuda:
        return called(contender, x)
    between = x.new_zeros(1) if apart else None
    everything(contender, x, between=between)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything(contender, x, between=between)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / len(contender.copies)

    replay()
    return replay


def called(contender: Contender, x: Tensor) -> Timed:
    """Calls from Python, until the device is done: seconds of one."""
    wait = torch.cuda.synchronize if x.is_cuda else (lambda: None)

    def call() -> float:
        wait()
        start = time.perf_counter()
        everything(contender, x)
        wait()
        return (time.perf_counter() - start) / len(contender.copies)

    call()
    return call


def everything(contender: Contender, x: Tensor, *, between: Tensor | None = None) -> None:
    """A call for every copy; with `between` a plain kernel before each.

    Matmuls that follow each other begin early beside each other, which those of a model cannot: before them
    stand norms and activations that let nothing begin.
    """
    for each in contender.copies:
        if between is not None:
            between.add_(1)
        contender.call(x, each)


def measured(
    setup: Setup,
    everyone: Field,
    x: Tensor,
    about: Line,
    record: Callable[[Contender, Tensor], Timed] = recorded,
) -> Iterator[Line]:
    """Check everyone, then take turns in every round, in an order that changes; a line for each.

    `beside` has, for every other contender, the median of the ratios within a round: greater is faster.
    `microseconds_apart` is the time with a plain kernel before each call, which is in it.
    """
    fresh_counters()
    timed: dict[str, Timed] = {}
    apart: dict[str, Timed] = {}
    failed = dict(everyone.failed)
    for name, each in everyone.contenders.items():
        try:
            check(each, x)
            timed[name] = record(each, x)
            if x.is_cuda and record is recorded:
                apart[name] = recorded(each, x, apart=True)
        except Exception as error:  # of any library
            failed[name] = told(error)
    times = turns(timed, setup.rounds)
    times_apart = turns(apart, setup.rounds)
    for name, taken in times.items():
        each, ordered = everyone.contenders[name], sorted(taken)
        middle = median(ordered)
        yield {
            **about,
            "contender": name,
            "kernel": each.kernel(x),
            "microseconds": middle * 1e6,
            "p10": ordered[len(ordered) // 10] * 1e6,
            "p90": ordered[-1 - len(ordered) // 10] * 1e6,
            "microseconds_apart": median(times_apart[name]) * 1e6 if name in times_apart else None,
            "share_of_copy": each.size / middle / setup.bandwidth,
            "beside": {
                other: median(a / b for a, b in zip(theirs, taken, strict=True))
                for other, theirs in times.items()
                if other != name
            },
        }
    for name, reason in failed.items():
        yield {**about, "contender": name, "failed": reason}


def fresh_counters() -> None:
    """Take back what launches in graphs counted with: these are gone, and each new one wants its own.

    Without any left a launch would fill its own with zeros, and that would be measured.
    """
    if torch.cuda.is_available():
        workspace.prepare(torch.device("cuda", torch.cuda.current_device()), renew=True)


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """By torch; sizes become variables when they change."""
    from torch._dynamo import config

    config.recompile_limit = (
        64  # many formats share a line of code, and beyond it nothing is compiled
    )
    return torch.compile(call)


def turns(timed: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds of everyone in each round."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name in random.sample(list(timed), len(timed)):
            times[name].append(timed[name]())
    return times


def check(contender: Contender, x: Tensor) -> None:
    """Raise where the numbers are not what they must be."""
    if contender.error is None:
        return
    found = contender.error(x, contender.call(x, contender.copies[0]))
    if not found < contender.bound:
        raise AssertionError(f"the error is {found:.1e}, and must be less than {contender.bound}")


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((found - expected).norm() / expected.norm())


#: rows of a result that are checked
CHECKED_ROWS = 64


def of_matmul(weight: Tensor) -> Callable[[Tensor, Tensor], float]:
    """The error of matmuls with a weight, quantized or not: the worst row of a sample with the last."""

    def error(x: Tensor, found: Tensor) -> float:
        quantized = isinstance(weight, QTensor)
        dense = weight.dequantize(torch.float32) if quantized else weight.float()
        rows = sampled_rows(len(x)).to(x.device)
        expected = x[rows].float() @ dense.t()
        # each row by itself: one wrong among many right ones would hardly be seen
        return max(distance(a, b) for a, b in zip(found[rows].float(), expected, strict=True))

    return error


def sampled_rows(count: int) -> Tensor:
    """`CHECKED_ROWS` of so many rows, or all: evenly spaced, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, CHECKED_ROWS)).round().long()

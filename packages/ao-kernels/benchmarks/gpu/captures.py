"""A small model in a CUDA graph, and compiled with mode="reduce-overhead": the logits of eager calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from generation import MODELS, TINY, Generator, Run, capture, model_of
from measuring import Case, Line, Setup, distance
from torch import Tensor

#: how far logits may be from those of eager calls: in a graph kernels are the same, compiled code rounds less
CAPTURED, COMPILED = 1e-3, 5e-2


def cases(setup: Setup) -> list[Case]:
    """One for each way to quantize the model."""
    return [Case(name, partial(of_model, setup, name)) for name in MODELS]


def of_model(setup: Setup, name: str) -> Iterator[Line]:
    """A line for each way to run it; one that differs fails the case."""
    on_gpu = setup.device == "cuda"
    model = model_of(TINY, name, setup.device, torch.bfloat16 if on_gpu else torch.float32)
    run = Generator(model, TINY.context)
    expected = logits(run, run.step)
    yield {"model": name, "mode": "eager", "finite": bool(expected.isfinite().all())}
    if not on_gpu:
        return
    found = logits(run, capture(run.step))
    yield compared(name, "captured", found, expected, CAPTURED)
    for part in run.cache:  # else a graph cannot write into them
        torch._dynamo.mark_static_address(part)
    torch._dynamo.utils.counters.clear()
    model.compile(mode="reduce-overhead", fullgraph=True, dynamic=False)
    logits(run, run.step)  # compiles, and records the graphs
    found = logits(run, run.step)
    line = compared(name, "reduce-overhead", found, expected, COMPILED)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    yield {**line, "graphs_skipped": skips}
    if skips:
        raise AssertionError(f"reduce-overhead recorded no graph {skips} times")


def logits(run: Generator, step: Run) -> Tensor:
    """After each of some tokens, from an empty cache on."""
    run.restart(0)
    for part in run.cache:
        part.zero_()
    found = []
    for token in range(3, 3 + 5 * 7, 7):
        run.token.fill_(token)
        step()
        found.append(run.logits.float().clone())
    return torch.stack(found)


def compared(name: str, mode: str, found: Tensor, expected: Tensor, bound: float) -> Line:
    """A line, or an error where the numbers are others."""
    error = distance(found, expected)
    if not error < bound:
        raise AssertionError(
            f"{name}, {mode}: logits differ by {error:.1e} from those of eager calls"
        )
    return {"model": name, "mode": mode, "error": error}

"""A step of AdamW on parameters of a Llama's shape, and on many small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from measuring import Case, Contender, Line, Setup, built, called, measured
from stepping import Shape, llama_shapes, makers, parameters, state_bytes
from torch import nn
from torch.optim import Optimizer


def cases(setup: Setup) -> list[Case]:
    """One for each kind of model."""
    problems = {
        "Llama-shaped": llama_shapes(128, 2, 512) if setup.tiny else llama_shapes(1600, 32, 32000),
        "500 small": [(64, 80)] * 20 if setup.tiny else [(160, 256)] * 500,
    }
    return [Case(name, partial(of_model, setup, name, each)) for name, each in problems.items()]


def of_model(setup: Setup, name: str, shapes: list[Shape]) -> Iterator[Line]:
    """Everyone over the same parameters in bfloat16, called from Python: no graph is captured."""
    params = parameters(shapes, torch.bfloat16, setup.device)
    elements = sum(each.numel() for each in params)
    everyone = built({who: partial(optimizer, params, make) for who, make in makers().items()})
    about = {"name": name, "shape": [elements], "tensors": len(params)}
    yield from measured(setup, everyone, params[0].detach(), about, record=called)


def optimizer(params: list[nn.Parameter], make: Callable[[Any], Optimizer]) -> Contender:
    """After a first step; parameters and state are read and written, gradients are read."""
    made = make(params)
    contender = Contender([made], lambda _, each: each.step())
    contender.call(params[0], made)  # makes the state, and compiles
    elements = sum(each.numel() for each in params)
    state = state_bytes(made, elements)
    contender.size = int(elements * (2 * 2 + 2 + 2 * state))
    contender.kernel = lambda x: f"{state:.2f} bytes of state per parameter"
    return contender

"""What the benchmarks of steps share: parameters, contenders of all libraries that are installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import ao_optim

#: learning rate of all: so small that parameters stay what they are
OPTIONS = {"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.1}
Shape = tuple[int, ...]


@dataclass
class Contender:
    """An optimizer that is measured, and what its first step took."""

    optimizer: Optimizer
    first_seconds: float = 0.0


def mixed_shapes(elements: int, tensors: int) -> list[Shape]:
    """Matrices of equal size, and a vector after every second one."""
    vectors = tensors // 3
    columns = max((elements - 1024 * vectors) // (tensors - vectors) // 512, 1)
    return [(1024,) if i % 3 == 2 else (512, columns) for i in range(tensors)]


def llama_shapes(width: int, layers: int, vocabulary: int) -> list[Shape]:
    """Nine tensors per layer, embedding, head and the last norm: 291 of 32 layers."""
    inner = width * 11 // 4
    layer = [*[(width, width)] * 4, (inner, width), (inner, width), (width, inner), *[(width,)] * 2]
    return [*layer * layers, (vocabulary, width), (vocabulary, width), (width,)]


def parameters(shapes: Sequence[Shape], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    """Normal values, with gradients."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: Shape) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    made = []
    for shape in shapes:
        made.append(nn.Parameter(normal(shape)))
        made[-1].grad = normal(shape) * 1e-3
    return made


def makers() -> dict[str, Callable[[Any], Optimizer]]:
    """Name -> optimizer over parameters, of torch, of this package and of the peers that are there."""
    found: dict[str, Callable[[Any], Optimizer]] = {
        "torch AdamW, fused": lambda p: AdamW(p, fused=True, **OPTIONS),
        "torch AdamW, foreach": lambda p: AdamW(p, foreach=True, **OPTIONS),
        "ao AdamW8bit": lambda p: ao_optim.AdamW8bit(p, **OPTIONS),
        "ao AdamW8bit, dynamic": lambda p: ao_optim.AdamW8bit(
            p, state_format="dynamic8", **OPTIONS
        ),
        "ao AdamWFp8": lambda p: ao_optim.AdamWFp8(p, **OPTIONS),
        "ao AdamW4bit": lambda p: ao_optim.AdamW4bit(p, **OPTIONS),
    }
    try:
        from torchao.optim import AdamW8bit as TorchAO8bit
        from torchao.optim import AdamWFp8 as TorchAOFp8
    except ImportError:
        pass
    else:
        found["torchao AdamW8bit"] = lambda p: TorchAO8bit(p, **OPTIONS)
        found["torchao AdamWFp8"] = lambda p: TorchAOFp8(p, **OPTIONS)
    try:
        from bitsandbytes.optim import AdamW8bit as BitsAndBytes8bit
    except ImportError:
        pass
    else:
        found["bitsandbytes AdamW8bit"] = lambda p: BitsAndBytes8bit(p, **OPTIONS)
    return found


def contenders(params: list[nn.Parameter], wait: Callable[[], object]) -> dict[str, Contender]:
    """All over the same parameters, after a first step that is timed."""
    found = {}
    for name, make in makers().items():
        made = found[name] = Contender(make(params))
        wait()
        start = time.perf_counter()
        made.optimizer.step()
        wait()
        made.first_seconds = time.perf_counter() - start
    return found


def state_bytes(optimizer: Optimizer, elements: int) -> float:
    """Bytes of state a parameter, of any library."""
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(map(_bytes, moments)) / elements


def _bytes(moment: Tensor) -> int:
    if hasattr(moment, "__tensor_flatten__"):
        names, _ = moment.__tensor_flatten__()
        return sum(_bytes(getattr(moment, name)) for name in names)
    return moment.numel() * moment.element_size()

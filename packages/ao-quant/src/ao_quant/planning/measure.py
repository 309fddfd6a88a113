"""The error of one quantized parameter: of its values, or of what the model answers with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.errors import ConfigError, QuantizationError
from ao_core.numerics import error_sums
from ao_core.records import Target

__all__ = [
    "MEASURES",
    "Replacement",
    "Sample",
    "answer",
    "distance",
    "evaluating",
    "replaced",
    "tensor_of",
    "weight_error",
]

#: "weight": noise / signal of the values; "output": noise / signal of what the model answers;
#: "kl": divergence of its distribution over the last dimension, in bits a position
MEASURES = ("weight", "output", "kl")

#: input of a model: its only argument, all positional ones, or all by keyword
Sample = Tensor | tuple[Any, ...] | Mapping[str, Any]
#: the owners of a parameter, and what they shall hold
Replacement = tuple[Sequence[Target], Tensor]

#: numbers of an answer that are widened to float64 at a time
_CHUNK = 1 << 22


def weight_error(dense: Tensor, new: Tensor) -> float:
    """Sum of the squared errors over the sum of squares; 0 where both are 0."""
    return _ratio(error_sums(dense, new.dequantize()))


def distance(measure: str) -> Callable[[Tensor, Tensor], float]:
    """The error of an answer, "output" or "kl": (right one, one to judge) -> error."""
    return _divergence if measure == "kl" else lambda ref, other: _ratio(error_sums(ref, other))


def answer(model: nn.Module, sample: Sample, replacements: Sequence[Replacement] = ()) -> Tensor:
    """What the model answers in evaluation mode, with some of its parameters replaced for that time.

    Raises:
        ConfigError: the answer holds no tensor.
        QuantizationError: without replacements, it has NaN or inf.
    """
    with evaluating(model), replaced(replacements):
        if isinstance(sample, Mapping):
            out = model(**sample)
        else:
            out = model(*sample) if isinstance(sample, tuple) else model(sample)
    found = tensor_of(out)
    if not replacements and not bool(torch.isfinite(found).all()):
        raise QuantizationError("the model answers the sample with NaN or inf; nothing to compare")
    return found.detach()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation mode, and nothing takes gradients."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Within this context the owners hold other parameters."""
    before = [(o, o.module._parameters[o.name]) for owners, _ in replacements for o in owners]
    try:
        for owners, tensor in replacements:
            parameter = nn.Parameter(tensor, requires_grad=False)
            for owner in owners:
                setattr(owner.module, owner.name, parameter)
        yield
    finally:
        for owner, old in before:
            setattr(owner.module, owner.name, old)


def tensor_of(out: Any) -> Tensor:
    """The first tensor of an answer: itself, its `logits`, or the first item."""
    if isinstance(out, Tensor):
        return out
    if isinstance(getattr(out, "logits", None), Tensor):
        return out.logits  # type: ignore[no-any-return]
    items = out.values() if isinstance(out, Mapping) else out
    if isinstance(items, (tuple, list)) or isinstance(out, Mapping):
        for item in items:
            return tensor_of(item)
    raise ConfigError(
        f"sample: the model answers it with a {type(out).__name__}; a tensor, a tuple that begins with "
        "one, or an object with `logits` is needed"
    )


def _ratio(sums: Tensor) -> float:
    signal, noise = sums.tolist()
    if noise == 0:
        return 0.0
    return noise / signal if signal else float("inf")


def _divergence(ref: Tensor, other: Tensor) -> float:
    """Mean over the positions of KL(ref || other) in bits; of logits over the last dimension."""
    classes = ref.shape[-1]
    p, q = ref.reshape(-1, classes), other.reshape(-1, classes)
    rows = max(_CHUNK // max(classes, 1), 1)
    total = 0.0
    for a, b in zip(p.split(rows), q.split(rows), strict=True):
        log_p = a.to(torch.float64).log_softmax(-1)
        log_q = b.to(torch.float64).log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return max(total / log(2.0) / max(p.shape[0], 1), 0.0)

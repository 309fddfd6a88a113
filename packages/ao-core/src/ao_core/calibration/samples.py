"""Running a model on a sample, as it is and with some of its parameters replaced for that time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.arguments import shown
from ao_core.errors import AoError, ConfigError, QuantizationError
from ao_core.numerics.fast_dense import fast_dense
from ao_core.records import Target

__all__ = [
    "Replacement",
    "Sample",
    "answer",
    "blaming",
    "call",
    "evaluating",
    "replaced",
    "tensor_of",
]

#: input of a model: its only argument, all positional ones, or all by keyword
Sample = Tensor | tuple[Any, ...] | Mapping[str, Any]
#: the owners of a parameter, and what they shall hold
Replacement = tuple[Sequence[Target], Tensor]


def call(model: nn.Module, sample: Sample, name: str = "sample") -> Any:
    """What the model returns for a sample, the argument `name` of who asks.

    Raises:
        ConfigError: the model raises TypeError, ValueError, IndexError or RuntimeError, which come of inputs
            that it cannot be called with; but for lack of memory, which stays what it is.
    """
    with blaming(model, sample, name):
        return _call(model, sample)


@contextmanager
def blaming(model: nn.Module, sample: Sample, name: str) -> Iterator[None]:
    """Within this context errors that come of a model's inputs are errors of the argument `name`."""
    try:
        yield
    except (AoError, torch.OutOfMemoryError):
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"{name}={shown(sample)}: the model, a {type(model).__name__}, cannot be called with it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _call(model: nn.Module, sample: Sample) -> Any:
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)


def answer(
    model: nn.Module,
    sample: Sample,
    replacements: Sequence[Replacement] = (),
    name: str = "sample",
) -> Tensor:
    """What the model answers in evaluation mode, with some of its parameters replaced for that time; eager.

    Raises:
        ConfigError: the model cannot be called with the sample, or the answer holds no tensor.
        QuantizationError: without replacements, it has NaN or inf.
    """
    with evaluating(model), replaced(replacements), fast_dense():
        # an error with other parameters is not the sample's
        out = _call(model, sample) if replacements else call(model, sample, name)
    found = tensor_of(out)
    if not replacements and not bool(torch.isfinite(found).all()):
        raise QuantizationError("the model answers the sample with NaN or inf; nothing to compare")
    return found.detach()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation mode, and nothing takes gradients.

    Afterwards each module is in the mode that it was in.
    """
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
    """The first tensor of an answer: itself, its `logits`, or the first item.

    Raises:
        ConfigError: the answer is something else.
    """
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

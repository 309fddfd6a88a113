"""How much a model's answers follow each weight: predicts what quantized weights do to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log

import torch
from torch import Tensor, nn

from ao_core.ext import ConfigError
from ao_core.ext.calibration import Sample, call, evaluating, matrices, tensor_of
from ao_core.ext.numerics import fast_dense
from ao_core.ext.quantizing import Decision

__all__ = ["Gradients", "gradients_of", "predicted_error"]

#: numbers of a gradient that are widened at a time, few enough for a processor's cache
_PIECE = 1 << 17
#: sums of gradients that are kept apart: each is a draw of the error, and their mean is steadier than one
_DRAWS = 4


@dataclass(frozen=True)
class Gradients:
    """Random combinations of a model's answers, differentiated by its weights."""

    #: by the name of a weight, in its shape, in bfloat16; a draw each
    draws: tuple[Mapping[str, Tensor], ...]
    #: by which the sum over the draws of squared changes becomes the error of the answers
    scale: float


def gradients_of(
    model: nn.Module,
    batches: Sequence[Sample],
    entries: Sequence[Decision],
    measure: str,
    seed: int = 0,
) -> Gradients:
    """Gradients by weights, of random combinations of the answers of all positions.

    For "output", answers are multiplied by random signs r: the expectation of ⟨∂ r·a / ∂ W, Δ⟩² is the
    squared change of the answers to first order. For "kl", a class c is drawn at each position from the
    model's own distribution: the expectation of ⟨∂ Σ log p(c) / ∂ W, Δ⟩² / 2 is the divergence to second
    order (the Fisher information; Martens, New insights and perspectives on the natural gradient method,
    2020). Positions are drawn independently, so gradients of many of them add up in one tensor.

    Raises:
        ConfigError: an answer depends on no weight.
    """
    generator = torch.Generator().manual_seed(seed)
    sums: list[dict[str, Tensor]] = [{} for _ in range(_DRAWS)]
    repeats, total, number = ceil(_DRAWS / len(batches)), 0.0, 0
    with _differentiable(model, entries) as parameters:
        for batch in batches:
            answer = tensor_of(call(model, batch, "data"))
            if not answer.requires_grad:
                raise ConfigError("data: the model's answer depends on no weight that is planned")
            for left in reversed(range(repeats)):
                combined, of = _combination(answer, measure, generator)
                found = torch.autograd.grad(
                    combined, list(parameters.values()), allow_unused=True, retain_graph=left > 0
                )
                into = sums[number % _DRAWS]
                for name, gradient in zip(parameters, found, strict=True):
                    if gradient is not None:
                        into[name] = into[name] + gradient if name in into else gradient
                total, number = total + of, number + 1
    draws = tuple({n: g.to(torch.bfloat16) for n, g in draw.items()} for draw in sums)
    return Gradients(draws, (0.5 / log(2.0) if measure == "kl" else 1.0) / max(total, 1e-300))


def _combination(answer: Tensor, measure: str, generator: torch.Generator) -> tuple[Tensor, float]:
    """A random combination of an answer, and what its error is divided by."""
    if measure == "kl":
        logs = answer.reshape(-1, answer.shape[-1]).float().log_softmax(-1)
        classes = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator)
        return logs.gather(1, classes.to(logs.device)).sum(), float(len(logs))
    signs = torch.randint(0, 2, answer.shape, generator=generator, device="cpu") * 2 - 1
    combined = (answer * signs.to(answer)).sum()
    return combined, float(answer.detach().double().square().sum())


@contextmanager
def _differentiable(model: nn.Module, entries: Sequence[Decision]) -> Iterator[dict[str, Tensor]]:
    """Within this context answers are differentiable by the weights of the entries, and no others."""
    wanted = {entry.fqn: entry.tensor for entry in entries}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        for tensor in wanted.values():
            tensor.requires_grad_(True)
        with evaluating(model), torch.enable_grad(), fast_dense():
            yield wanted
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def predicted_error(entry: Decision, new: Tensor, gradients: Gradients) -> float | None:
    """The error of the answers with a quantized weight; None: they do not depend on it.

    Σ over the draws, and over outputs n of the layer, of ⟨G_n, Δ_n⟩²: errors of inputs of the same output add
    up as they do in the model, those of different outputs as if they were independent. That they are nearly
    so leaves as many terms as there are outputs to average over, in place of one.
    """
    target, change = entry.owners[0], new.dequantize().float() - entry.tensor.detach().float()
    found = [draw[entry.fqn] for draw in gradients.draws if entry.fqn in draw]
    if not found:
        return None
    delta = matrices(change, target).flatten(0, -2)
    rows = max(_PIECE // max(delta.shape[-1], 1), 1)
    squares = torch.zeros((), dtype=torch.float64, device=delta.device)
    for gradient in found:
        pieces = matrices(gradient, target).flatten(0, -2).split(rows)
        for one, of in zip(pieces, delta.split(rows), strict=True):
            squares += torch.linalg.vecdot(one.float(), of).double().square().sum()
    return float(squares) * gradients.scale

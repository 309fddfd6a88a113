"""The error of one quantized parameter: of its values, or of what the model answers with it."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from ao_core.ext.numerics import error_sums

__all__ = ["MEASURES", "distance", "divergence", "positions", "ratio", "size", "weight_error"]

#: "weight": noise / signal of the values; "layer": of what the weight is multiplied to; "output": of what
#: the model answers; "kl": divergence of its distribution over the last dimension, in bits per position
MEASURES = ("weight", "layer", "output", "kl")

#: numbers of an answer that are widened to float64 at a time
_CHUNK = 1 << 22


def weight_error(dense: Tensor, new: Tensor) -> float:
    """Sum of the squared errors over the sum of squares; 0 where both are 0."""
    signal, noise = error_sums(dense, new.dequantize()).tolist()
    return ratio(noise, signal)


def distance(measure: str) -> Callable[[Tensor, Tensor], float]:
    """(right answer, one to judge) -> its error as a sum, to be divided by `size`."""
    return divergence if measure == "kl" else _noise


def positions(answer: Tensor) -> int:
    """How many vectors of the last dimension an answer has."""
    return answer.numel() // max(answer.shape[-1], 1)


def size(measure: str, answer: Tensor) -> float:
    """What the error of an answer is divided by: positions, or the sum of its squares."""
    if measure == "kl":
        return float(positions(answer))
    return float(error_sums(answer, answer)[0])


def ratio(amount: float, of: float) -> float:
    """The quotient; 0 where there is no error at all."""
    if amount == 0:
        return 0.0
    return amount / of if of else float("inf")


def _noise(ref: Tensor, other: Tensor) -> float:
    return float(error_sums(ref, other)[1])


def divergence(ref: Tensor, other: Tensor) -> float:
    """The sum over the positions of KL(ref || other) in bits, of logits (…, classes) of one shape."""
    classes = ref.shape[-1]
    p, q = ref.reshape(-1, classes), other.reshape(-1, classes)
    rows = max(_CHUNK // max(classes, 1), 1)
    total = 0.0
    for a, b in zip(p.split(rows), q.split(rows), strict=True):
        log_p = a.to(torch.float64).log_softmax(-1)
        log_q = b.to(torch.float64).log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return max(total, 0.0) / log(2.0)

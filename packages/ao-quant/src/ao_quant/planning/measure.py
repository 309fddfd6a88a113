"""The error of one quantized parameter: of its values, or of what the model answers with it."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
from torch import Tensor

from ao_core.ext.numerics import error_sums

__all__ = ["MEASURES", "distance", "weight_error"]

#: "weight": noise / signal of the values; "layer": of what the weight is multiplied to; "gradient": of what
#: the model answers, predicted from that; "output": of what the model answers; "kl": divergence of its
#: distribution over the last dimension, in bits per position
MEASURES = ("weight", "layer", "gradient", "output", "kl")

#: numbers of an answer that are widened to float64 at a time
_CHUNK = 1 << 22


def weight_error(dense: Tensor, new: Tensor) -> float:
    """Sum of the squared errors over the sum of squares; 0 where both are 0."""
    return _ratio(error_sums(dense, new.dequantize()))


def distance(measure: str) -> Callable[[Tensor, Tensor], float]:
    """The error of an answer, "output" or "kl": (right one, one to judge) -> error."""
    return _divergence if measure == "kl" else lambda ref, other: _ratio(error_sums(ref, other))


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

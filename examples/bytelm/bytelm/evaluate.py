"""Measures of a model on held-out text: bits per byte, divergence from another model, agreement."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Quality:
    """How well a model predicts, and how near its predictions are to another's."""

    #: mean of −log2 p(next byte)
    bits_per_byte: float
    #: mean over the positions of KL(original ‖ model), in bits
    kl_bits: float
    #: share of positions at which both find the same byte likeliest
    agreement: float


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """−log2 of the probability of each target, (…) float32, for logits (…, V)."""
    found = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return found.view(targets.shape) / math.log(2)


def kl_bits(original: Tensor, logits: Tensor) -> Tensor:
    """KL(original ‖ model) in bits at each position, for logits (…, V) of both.

    Computed in float64, for near models differ by less than float32 resolves in a log-probability.
    """
    log_p, log_q = (x.double().log_softmax(-1) for x in (original, logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1) / math.log(2)


def predict(model: nn.Module, windows: Tensor, batch: int = 16) -> Tensor:
    """Logits for the bytes in the second half of each window, (B, T / 2, V).

    Each has at least half a window before it. `windows` is (B, T) bytes as integers; `batch` is how
    many are computed at once.
    """
    half = windows.shape[1] // 2
    with torch.inference_mode():
        parts = [model(part[:, :-1])[:, half - 1 :].float() for part in windows.split(batch)]
    return torch.cat(parts)


def bits_per_byte(model: nn.Module, windows: Tensor, batch: int = 16) -> float:
    """The mean of −log2 p over the second halves of windows (B, T)."""
    half = windows.shape[1] // 2
    total = 0.0
    for part in windows.split(batch):
        total += float(bits(predict(model, part, batch), part[:, half:]).sum(dtype=torch.float64))
    return total / (len(windows) * half)


def quality(original: Tensor, logits: Tensor, windows: Tensor) -> Quality:
    """Compare what `predict` gave for a model with what it gave for the original."""
    targets = windows[:, windows.shape[1] // 2 :]
    return Quality(
        float(bits(logits, targets).mean(dtype=torch.float64)),
        float(kl_bits(original, logits).mean()),
        float((original.argmax(-1) == logits.argmax(-1)).double().mean()),
    )

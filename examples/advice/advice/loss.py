"""What a model loses in another form, computed apart from what `plan` and `autoquant` compute."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advice.subjects import Sample, Subject
from ao_core import QTensor, quantize_
from ao_core.ext import ConfigLike


class Loss(NamedTuple):
    """Of a model, on inputs that nothing was chosen by."""

    #: KL divergence of the answers in nats per position; or their squared error over the sum of their squares
    loss: float
    #: share of the positions with the same likeliest class; None where the answers are no logits
    agreement: float | None


def call(model: nn.Module, sample: Sample) -> Any:
    """What the model returns."""
    return model(**sample) if isinstance(sample, dict) else model(sample)


@torch.inference_mode()
def answers(model: nn.Module, samples: Sequence[Sample]) -> list[Tensor]:
    """What the model answers; of logits, the logarithms of the probabilities."""
    found = []
    for sample in samples:
        out = call(model, sample)
        out = getattr(out, "logits", out)
        found.append(getattr(out, "last_hidden_state", out).float())
    return found


def loss(subject: Subject, right: Sequence[Tensor], made: nn.Module) -> Loss:
    """What a model loses on the inputs that are held out, whose right answers are given."""
    total = same = count = 0.0
    for sample, expected in zip(subject.held_out, right, strict=True):
        (found,) = answers(made, [sample])
        if subject.measure == "kl":
            a, b = (x.flatten(0, -2).double().log_softmax(-1) for x in (expected, found))
            total += float(F.kl_div(b, a, log_target=True, reduction="sum"))
            same += float((a.argmax(-1) == b.argmax(-1)).sum())
            count += len(a)
        else:
            total += float((expected - found).double().square().sum())
            count += float(expected.double().square().sum())
    return Loss(total / count, same / count if subject.measure == "kl" else None)


def quantized(subject: Subject, config: ConfigLike, **options: Any) -> nn.Module:
    """A copy in a recipe, which shares all other parameters."""
    memo = {id(parameter): parameter for parameter in subject.model.parameters()}
    made = copy.deepcopy(subject.model, memo=memo)
    quantize_(made, config, **options)
    return made


def nbytes(model: nn.Module) -> int:
    """Bytes of all parameters; tied ones count once."""
    return sum(p.stored_bytes if isinstance(p, QTensor) else p.nbytes for p in model.parameters())

"""Measure a model's matmuls before it serves, so that none of its calls has to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.ext import ConfigError, is_converted
from ao_kernels.triton.shared.device import unavailable
from ao_kernels.triton.tuning.choose import tuner_of

__all__ = ["ROWS", "Tuned", "tune", "tune_weights"]

#: numbers of rows of activations: each serves those down to the power of two below
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Tuned(NamedTuple):
    """How one problem is decided in this process."""

    #: a `Problem` as text
    problem: str
    #: None: as the rule says
    setting: dict[str, int] | None
    #: "measured", "cache", "shipped" or "rule"
    source: str


def tune(model: nn.Module, rows: Sequence[int] = ROWS) -> list[Tuned]:
    """Decide, and keep, with which settings the linear layers of a model are launched.

    Every quantized weight of two dimensions on a CUDA device is multiplied by random activations in
    its logical dtype; nothing of the model changes. What is known already is not measured again.

    Raises:
        ConfigError: no Triton kernel can run here, or `rows` has a number below 1.
    """
    if reason := unavailable():
        raise ConfigError(f"there is nothing to tune: {reason}")
    return tune_weights(model.parameters(), rows)


def tune_weights(weights: Iterable[Tensor], rows: Sequence[int] = ROWS) -> list[Tuned]:
    """`tune` for some weights; those that are not quantized, or not on a CUDA device, are passed over.

    Returns all decisions of the process for these devices.
    """
    if any(m < 1 for m in rows):
        raise ConfigError(f"rows={tuple(rows)}: numbers of rows are 1 or more")
    tuners = {}
    with ExitStack() as stack, torch.no_grad():
        for w in weights:
            if not is_converted(w) or w.dim() != 2 or not w.is_cuda:
                continue
            if w.device not in tuners:
                tuners[w.device] = tuner_of(w.device)
                stack.enter_context(tuners[w.device].ahead())
            for m in rows:
                F.linear(torch.randn(m, w.shape[1], dtype=w.dtype, device=w.device), w)
    return [
        Tuned(str(problem), None if setting is None else dict(setting._asdict()), source)
        for tuner in tuners.values()
        for problem, (setting, source) in tuner.decisions.items()
    ]

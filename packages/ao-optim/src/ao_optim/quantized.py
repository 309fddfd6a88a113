"""Parameters that are quantized and trained: a step in float32, rounded stochastically into their codes."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext import STOCHASTIC, stochastic_rounding
from ao_core.ext.kernels import current_generator

__all__ = ["check_trainable", "write_rounded"]


def check_trainable(param: QTensor, rounding: str) -> None:
    """Raise `ValueError` where an optimizer could not train a quantized parameter."""
    if STOCHASTIC not in param.spec.options:
        raise ValueError(
            f"a parameter holds {param.spec}, rounded to nearest: updates below half a step would be lost. "
            "Train weights of the recipe int8_weight_only_training, or adapters beside this one"
        )
    if rounding == "kahan":
        raise ValueError(
            "rounding='kahan' keeps what 16 bits cannot hold, and a quantized parameter rounds "
            "at random: use rounding='nearest' or 'stochastic', which mean the same for it"
        )


def write_rounded(param: Tensor, value: Tensor, seed: int) -> None:
    """Round float32 values stochastically into the codes of a parameter.

    The generator of `stochastic_rounding` draws, where it is entered; else one of `seed`.
    """
    generator = current_generator()
    if generator is None:
        generator = torch.Generator(value.device).manual_seed(seed)
    with stochastic_rounding(generator):
        # of weight 1, which takes the values as they are; an operation in place rounds at random
        param.detach().lerp_(value, 1.0)

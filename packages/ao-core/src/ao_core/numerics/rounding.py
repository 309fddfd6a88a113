"""Rounding to integers and to shorter floats."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.errors import ConfigError

__all__ = ["round_half_even", "stochastic_round_to"]


def round_half_even(x: Tensor) -> Tensor:
    """Nearest integer, ties to the even one."""
    return torch.round(x)


def stochastic_round_to(
    x: Tensor, dtype: torch.dtype = torch.bfloat16, generator: torch.Generator | None = None
) -> Tensor:
    """Round float32 to one of its two bfloat16 neighbours, the nearer the likelier: E[result] = x.

    NaN and infinities stay; a value beyond the greatest finite bfloat16 may become infinite.
    """
    if x.dtype != torch.float32 or dtype != torch.bfloat16:
        raise ConfigError(
            f"stochastic rounding from {x.dtype} to dtype={dtype} is not defined; "
            "use float32 input and dtype=torch.bfloat16"
        )
    # bfloat16 is the upper half of float32: a random number below one unit of that half carries
    # into it with the probability that the lower half stands for.
    noise = torch.randint(
        0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    rounded = ((x.detach().view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(dtype)

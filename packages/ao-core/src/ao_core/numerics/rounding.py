"""Rounding to integers and to 16-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.errors import ConfigError

__all__ = ["round_half_even", "round_to_16_bits", "stochastic_round", "stochastic_round_to"]


def round_half_even(x: Tensor) -> Tensor:
    """Nearest integer, ties to the even one."""
    return torch.round(x)


def round_to_16_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to the values of bfloat16 or float16, ties to even, and keep it in float32.

    Arithmetic in place of a cast there and back, which compilers may drop. NaN stays NaN; float16
    does not overflow: |x| must not exceed 65504.
    """
    bits = x.view(torch.int32)
    drop = 16 if dtype == torch.bfloat16 else 13
    odd = (bits >> drop) & 1
    rounded = ((bits + odd + ((1 << (drop - 1)) - 1)) & -(1 << drop)).view(torch.float32)
    rounded = torch.where(torch.isnan(x), x, rounded)  # a NaN of all ones would overflow to 0
    if dtype == torch.bfloat16:
        return rounded
    # Below 2**-14 float16 has a fixed step of 2**-24, as float32 has between 0.5 and 1.
    half = torch.where(x < 0, -0.5, 0.5)
    return torch.where(x.abs() < 2.0**-14, ((x + half) - half).copysign(x), rounded)


def stochastic_round(x: Tensor, generator: torch.Generator) -> Tensor:
    """One of the two integers beside each element, the nearer the likelier: E[result] = x."""
    noise = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return torch.floor(x + noise)


def stochastic_round_to(
    x: Tensor, dtype: torch.dtype = torch.bfloat16, generator: torch.Generator | None = None
) -> Tensor:
    """Round float32 to one of its two bfloat16 neighbours, the nearer the likelier: E[result] = x.

    NaN and infinities stay; a value beyond the greatest finite bfloat16 may become infinite.

    Args:
        x: float32, any shape.
        dtype: bfloat16.
        generator: of the random numbers; None: torch's own for the device of `x`.

    Raises:
        ConfigError: other dtypes.
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

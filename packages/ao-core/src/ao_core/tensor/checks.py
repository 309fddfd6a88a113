"""Whether a tensor has values that can be quantized."""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ao_core.arguments import shown
from ao_core.errors import QuantizationError
from ao_core.spec import Spec

__all__ = ["check_finite", "check_given", "check_quantizable"]


def check_quantizable(x: Tensor, name: str = "tensor") -> None:
    """Raise `QuantizationError` unless `x` holds floating-point values that quantizing keeps finite.

    The value that a code stands for may lie beyond the one that was rounded to it, by up to a third in
    formats of 2 to 4 bits: what is next to the greatest number of a dtype would become inf.
    """
    magnitude, limit = check_finite(x, name), torch.finfo(x.dtype).max / 2
    if magnitude > limit:
        raise QuantizationError(
            f"{name} has values up to {magnitude:.4g}, and beyond half of what {x.dtype} holds, {limit:.4g}, "
            "rounding may give inf; convert it to a wider dtype, scale it down, or exclude it"
        )


def check_finite(x: Tensor, name: str) -> float:
    """The greatest magnitude in `x`; `QuantizationError` unless it holds finite floating-point values."""
    if not x.is_floating_point():
        raise QuantizationError(
            f"{name} has dtype {x.dtype}; only floating-point tensors can be quantized"
        )
    if x.device.type == "meta":
        raise QuantizationError(
            f"{name} is on the meta device and has no values; load its weights first"
        )
    magnitude = _greatest(x)
    if not isfinite(magnitude):
        bad = int((~torch.isfinite(x)).sum())
        raise QuantizationError(
            f"{name} has {bad} NaN or inf values of {x.numel()}; repair the checkpoint or exclude it"
        )
    return magnitude


def check_given(spec: Spec, names: Container[str], given: Mapping[str, Any], hint: str) -> None:
    """Raise `QuantizationError` unless just those parts are given that a format has.

    Args:
        spec: the format.
        names: of the parts that it has.
        given: name -> value, None where there is none.
        hint: when a part is given, for the message.
    """
    for name, value in given.items():
        if (value is None) == (name in names):
            wanted = "needs" if name in names else "has no place for"
            raise QuantizationError(f"{name}={shown(value)}: the format {spec} {wanted} it; {hint}")


def _greatest(x: Tensor) -> float:
    """The greatest magnitude; NaN or inf where there is one."""
    if x.numel() == 0:
        return 0.0
    # one pass that writes nothing: NaN becomes both extremes, infinity is one of them
    low, high = (float(extreme) for extreme in torch.aminmax(x.detach()))
    return high if high > -low or high != high else -low

"""Types of options: each option has the type of its default."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_types"]


def check_types(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of another type than its default; values are the rule's to check."""
    for name, default in defaults.items():
        value = options[name]
        if wanted := _wanted(name, value, default):
            raise ValueError(f"Invalid {name}: {name}={value!r} cannot work; use {wanted}")


def _wanted(name: str, value: Any, default: Any) -> str | None:
    """What would fit; None where the type does."""
    if default is None:  # None, and what the rule knows
        return None if value is None or isinstance(value, str) or _is_number(value) else "None"
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "True or False"
    if isinstance(default, str):
        return None if isinstance(value, str) else f"a string such as {default!r}"
    if isinstance(default, tuple):
        fits = isinstance(value, (tuple, list)) and len(value) == len(default)
        return None if fits and all(map(_is_number, value)) else f"{len(default)} numbers"
    if name == "seed":
        fits = isinstance(value, torch.Generator) or _is_integer(value)
        return None if fits else "an integer or a torch.Generator"
    if isinstance(default, int):
        return None if _is_integer(value) else "an integer"
    # of a tensor with more elements, the rule says it in torch's words
    return None if _is_number(value) or (name == "lr" and isinstance(value, Tensor)) else "a number"


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number or (isinstance(value, Tensor) and value.numel() == 1)

"""The functions of ao-quant that a cache is made of, found by name: ao-hf does not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from ao_core.ext import MissingExtraError

__all__ = ["Functions", "functions"]


class Functions(NamedTuple):
    """Those of `ao_quant.kv_cache` that have these names."""

    KVCacheConfig: Callable[..., Any]
    append_: Callable[..., None]
    attend_to: Callable[..., Any]
    bytes_per_token: Callable[..., float]
    coded_tokens: Callable[..., int]
    crop_: Callable[..., None]
    dequantized: Callable[..., Any]
    exact_like: Callable[..., Any]
    grown: Callable[..., Any]
    kv_config: Callable[..., Any]
    new_kv: Callable[..., Any]
    reorder_: Callable[..., None]
    repeat: Callable[..., Any]
    reset_: Callable[..., None]
    select: Callable[..., Any]
    widened: Callable[..., Any]


@cache
def functions() -> Functions:
    """All of them.

    Raises:
        MissingExtraError: ao-quant is not installed.
    """
    try:
        module = import_module("ao_quant.kv_cache")
    except ModuleNotFoundError as error:
        raise MissingExtraError("ao_quant", "ao-quant", "AoCache") from error
    return Functions(*(getattr(module, name) for name in Functions._fields))

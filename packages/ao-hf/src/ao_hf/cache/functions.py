"""The functions of ao-quant that a cache is made of, found by name: ao-hf does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from ao_core.ext import MissingExtraError

__all__ = ["Functions", "Solving", "functions", "solving"]


class Functions(NamedTuple):
    """Those of `ao_quant.kv_cache` that have these names."""

    KVCacheConfig: Callable[..., Any]
    KV_RECIPES: Mapping[str, Any]
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


class Solving(NamedTuple):
    """Those of `ao_quant.planning`."""

    divergence: Callable[..., float]
    rank_correlation: Callable[..., float | None]
    solve: Callable[..., list[int] | None]


@cache
def functions() -> Functions:
    """All of them.

    Raises:
        MissingExtraError: ao-quant is not installed.
    """
    return Functions(*_found("ao_quant.kv_cache", Functions._fields, "AoCache"))


@cache
def solving() -> Solving:
    """What plans are made of.

    Raises:
        MissingExtraError: ao-quant is not installed.
    """
    return Solving(*_found("ao_quant.planning", Solving._fields, "plan_cache()"))


def _found(name: str, fields: tuple[str, ...], asked: str) -> list[Any]:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError("ao_quant", "ao-quant", asked) from error
    return [getattr(module, field) for field in fields]

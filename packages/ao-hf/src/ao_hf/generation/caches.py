"""The cache of keys and values that a model generates with: transformers' own, or one in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

__all__ = ["cache_bytes", "check_kv", "decoding", "fixed_cache", "make_cache"]

#: fewest tokens that a cache of fixed size has memory for
_FEWEST = 512


def check_kv(kv: str | None) -> None:
    """Raise `UnknownNameError`, with a suggestion, where no recipe of caches has that name."""
    if kv is None:
        return
    from ao_hf.cache.functions import functions

    functions().kv_config(kv)


def make_cache(model: Any, kv: str | None, tokens: int | None = None) -> Any:
    """An empty cache for `past_key_values`.

    Args:
        model: of transformers.
        kv: name of a recipe for caches; None: transformers' cache in the dtype of the model.
        tokens: memory for so many is taken at once, and compiled code can use the cache; None: it grows.

    Raises:
        UnknownNameError: no recipe of caches has that name.
    """
    if kv is not None:
        from ao_hf import AoCache

        return AoCache(model.config, kv, max_cache_len=tokens)
    from transformers import DynamicCache, StaticCache

    if tokens is None:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=tokens)


def fixed_cache(model: Any, kv: str | None, tokens: int) -> tuple[Any, Any]:
    """An empty cache with memory for so many tokens, and what lets a model decode with it by programs.

    Programs are compiled for one size of the cache, so it is a power of two. Without a recipe keys and values
    are all in the exact tail of the cache.

    Returns:
        The cache of `make_cache`, and a context for the time of generation; None for the context where
        programs cannot decode with such a cache.
    """
    from ao_hf import AoCache
    from ao_hf.cache.functions import functions
    from ao_hf.generation.steps import can_step, stepping

    size = max(_FEWEST, 1 << (tokens - 1).bit_length())
    exact = functions().KVCacheConfig(window=size, center=False)
    cache = AoCache(model.config, exact if kv is None else kv, max_cache_len=size)
    if can_step(model, cache):
        return cache, stepping(model, cache)
    return make_cache(model, kv, tokens), None


@contextmanager
def decoding(model: Any, kv: str | None) -> Iterator[None]:
    """A time in which the attention of a model reads such a cache; as it was afterwards."""
    if kv is None:
        yield
        return
    from ao_hf.cache.names import ATTENTION

    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache takes, with memory that no token is in yet."""
    if hasattr(cache, "report"):
        return int(cache.report().nbytes)
    layers = getattr(cache, "layers", ())
    tensors = [x for layer in layers for x in vars(layer).values() if isinstance(x, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def cache_reads(cache: Any, rows: int) -> int:
    """Bytes of keys and values that one step of decoding reads: those of tokens that are there."""
    from ao_hf.cache.layers import AoLayer

    total = 0.0
    for layer in cache.layers:
        if isinstance(layer, AoLayer) and layer.kv is not None:
            total += _reads_of(layer.kv, rows)
        else:
            total += sum(_filled(x, layer) for x in vars(layer).values() if isinstance(x, Tensor))
    return int(total)


def _reads_of(kv: Any, rows: int) -> float:
    """Codes of tokens in blocks, and the exact rest."""
    from ao_hf.cache.functions import functions

    size = sum(tail.shape[1] * tail.shape[3] for tail in (kv.tail_key, kv.tail_value))
    exact = (kv.tokens - kv.coded) * size * kv.dtype.itemsize
    return float(rows * (kv.coded * functions().bytes_per_token(kv) + exact))


def _filled(tensor: Tensor, layer: Any) -> float:
    """Bytes of the tokens that are there, of a tensor (rows, heads, tokens, elements) that may be larger."""
    if tensor.dim() != 4:
        return 0
    return tensor.nbytes * min(int(layer.get_seq_length()) / max(tensor.shape[2], 1), 1.0)

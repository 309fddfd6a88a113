"""The cache of keys and values that a model generates with: transformers' own, or one in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ao_core.ext import ConfigError
from ao_hf.cache.names import ATTENTION, EXACT

if TYPE_CHECKING:
    from ao_hf.cache import CachePlan

__all__ = [
    "cache_bytes",
    "cache_name",
    "cache_reads",
    "cache_refusal",
    "check_kv",
    "computed_bytes",
    "decoding",
    "exact_cache",
    "fill",
    "fixed_cache",
    "make_cache",
    "read_kv",
]

#: tokens that a cache is filled with at once
_PIECE = 4096
#: fewest tokens that a cache of fixed size has memory for
_FEWEST = 512


def check_kv(kv: str | CachePlan | None) -> None:
    """Raise `UnknownNameError`, with a suggestion, where no recipe of caches has that name."""
    if kv is None:
        return
    from ao_hf.cache.functions import functions
    from ao_hf.cache.plans import CachePlan

    if not isinstance(kv, CachePlan):
        functions().kv_config(kv)


def read_kv(kv: str | None) -> str | CachePlan | None:
    """The name of a recipe, or the plan in a file of that name, which ends with .json.

    Raises:
        UnknownNameError: no recipe of caches has that name.
        ConfigError: the file cannot be read, or has no plan of a cache.
    """
    if kv is None or not kv.endswith(".json"):
        check_kv(kv)
        return kv
    from ao_hf.cache.plans import CachePlan

    return CachePlan.load(kv)


def make_cache(model: Any, kv: str | CachePlan | None, tokens: int | None = None) -> Any:
    """An empty cache for `past_key_values`.

    Args:
        model: of transformers.
        kv: name of a recipe for caches, or a plan; None: in the dtype of the model, as an exact `AoCache`
            where ao's decode step serves the model (see `cache_refusal`), else as transformers' cache.
        tokens: memory for so many is taken at once, and compiled code can use the cache; None: it grows.

    Raises:
        UnknownNameError: no recipe of caches has that name.
        ConfigError: the plan is for another number of layers.
    """
    if kv is not None:
        from ao_hf import AoCache

        return AoCache(model.config, kv, max_cache_len=tokens)
    from transformers import DynamicCache, StaticCache

    if tokens is None and cache_refusal(model) is None:
        return exact_cache(model)
    if tokens is None:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=tokens)


def fixed_cache(model: Any, kv: str | CachePlan | None, tokens: int) -> tuple[Any, Any]:
    """An empty cache with memory for so many tokens, and what lets a model decode with it by programs.

    Programs are compiled for one size of the cache, so it is a power of two. Without a recipe keys and values
    are all in the exact tail of the cache.

    Returns:
        The cache of `make_cache`, and a context for the time of generation; None for the context where
        programs cannot decode with such a cache.
    """
    from ao_hf import AoCache
    from ao_hf.generation.steps import can_step, stepping

    size = max(_FEWEST, 1 << (tokens - 1).bit_length())
    cache = AoCache(model.config, kv or EXACT, max_cache_len=size)
    if can_step(model, cache):
        return cache, stepping(model, cache)
    return make_cache(model, kv, tokens), None


def exact_cache(model: Any) -> Any:
    """An empty `AoCache` that keeps all tokens exact, and grows."""
    from ao_hf import AoCache

    return AoCache(model.config, EXACT)


def cache_refusal(model: Any) -> str | None:
    """Why a model generates with transformers' cache where none is named; None: with an exact `AoCache`."""
    from ao_hf.fusing.generating import cache_refusal as refusal

    with torch.no_grad():  # as in generation
        return refusal(model)


def cache_name(model: Any, cache: Any, kv: str | CachePlan | None) -> str:
    """What a cache is, for people: its recipe, "exact", or that of transformers and why."""
    from ao_hf import AoCache

    if isinstance(cache, AoCache):
        return EXACT if kv is None else kv if isinstance(kv, str) else repr(kv)
    reason = cache_refusal(model) or "memory of a fixed size was asked for"
    return f"{type(cache).__name__} of transformers: {reason}"


@contextmanager
def decoding(model: Any, kv: str | CachePlan | None) -> Iterator[None]:
    """A time in which the attention of a model reads such a cache; as it was afterwards."""
    if kv is None:
        yield
        return
    from ao_hf.cache.attention import attending

    with attending(model, ATTENTION):
        yield


def fill(cache: Any, model: Any, rows: int, tokens: int, capacity: int | None = None) -> None:
    """Fill an empty cache with random keys and values, in place of a prefill.

    Speed and memory of decoding need no others, and a prefill of 100,000 tokens takes hours on a CPU. Some
    thousand tokens are drawn for each layer, and come again and again.

    Args:
        cache: that `make_cache` made.
        model: whose attention reads such a cache, see `decoding`.
        rows: of the batch.
        tokens: of each row; 0 leaves the cache as it is.
        capacity: memory for so many tokens is taken at once by layers that grow; None: for `tokens`.

    Raises:
        ConfigError: a layer keeps something else than keys and values.
    """
    from ao_hf.cache.layers import AoLayer

    if not tokens:
        return
    for number, (layer, like) in enumerate(zip(cache.layers, _one_token(model), strict=True)):
        if like is None:
            raise ConfigError(
                f"filled={tokens}: layer {number} of {type(model).__name__} keeps no keys and values, and "
                "what it keeps cannot be drawn; use filled=0 and a longer prompt"
            )
        generator, size = torch.Generator().manual_seed(number), min(tokens, _PIECE)
        pieces = [
            torch.randn(rows, x.shape[1], size, x.shape[3], generator=generator).to(x) for x in like
        ]
        # a view with the shape of all tokens, which takes no memory
        layer.lazy_initialization(
            *(x[:, :, :1].expand(-1, -1, capacity or tokens, -1) for x in pieces)
        )
        for start in range(0, tokens, size):
            layer.update(*(x[:, :, : tokens - start] for x in pieces))
            if isinstance(layer, AoLayer) and layer.kv is not None and layer.kv.coded:
                _repeat(layer.kv, pieces, tokens)
                layer.tokens = tokens
                break


def _repeat(kv: Any, pieces: Sequence[Tensor], tokens: int) -> None:
    """Repeat the codes that are there, until there are so many tokens: codes take longer than copies."""
    from ao_hf.cache.functions import functions

    coded, wanted = kv.coded, functions().coded_tokens(tokens, kv.window)
    for stored in (kv.key, kv.value):
        for leaf in stored.leaves:
            # scales may be shared by the tokens of a block
            there, end = (n * leaf.shape[2] // stored.shape[2] for n in (coded, wanted))
            for start in range(there, end, there):
                stop = min(start + there, end)
                leaf[:, :, start:stop] = leaf[:, :, : stop - start]
    for tail, piece in zip((kv.tail_key, kv.tail_value), pieces, strict=True):
        slots = torch.arange(tail.shape[2], device=piece.device) % piece.shape[2]
        tail.copy_(piece[:, :, slots])
    kv.counts.copy_(torch.tensor([tokens, wanted]))


def _one_token(model: Any) -> list[tuple[Tensor, Tensor] | None]:
    """Keys and values (1, heads, 1, D) of each layer; None where it has none."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache)
    found = [(getattr(x, "keys", None), getattr(x, "values", None)) for x in cache.layers]
    return [None if key is None or value is None else (key, value) for key, value in found]


def computed_bytes(model: Any, kv: str | None, rows: int, tokens: int) -> int:
    """Bytes that a cache for so many tokens would take; parameters may be on the meta device."""
    text = model.config.get_text_config(decoder=True)
    cache = make_cache(model, kv, tokens)
    heads = text.num_key_value_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache.early_initialization(rows, heads, size, model.dtype, torch.device("meta"))
    return cache_bytes(cache)


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache takes, with memory that no token is in yet."""
    from ao_hf.cache.report import layer_bytes

    return sum(layer_bytes(layer) for layer in cache.layers)


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

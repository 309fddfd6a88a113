"""`AoCache`: keys and values of all layers of a model, where layers that see the whole text are quantized."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)

from ao_core.ext import ConfigError, MissingExtraError, shown
from ao_hf.cache.layers import AoLayer, AoStaticLayer
from ao_hf.cache.names import EXACT
from ao_hf.cache.report import CacheReport, layer_memory

if TYPE_CHECKING:
    from ao_quant.kv_cache import KVCacheConfig

__all__ = ["AoCache", "AoEncoderDecoderCache"]

#: the layer type that is quantized; windows, chunks and states are small, and stay those of transformers
_QUANTIZED = "full_attention"


class AoCache(Cache):  # type: ignore[misc]
    """A cache for `model.generate(…, past_key_values=cache)` and `model(…, past_key_values=cache)`.

    Layers that see the whole text keep keys and values in few bits; the others are those of transformers. With
    `model.set_attn_implementation("ao_kv")` attention reads them as they are stored. With any other attention
    they are dequantized at each step: the same memory between steps, but slower.

    Args:
        config: `model.config`.
        kv: a `KVCacheConfig` or a name of `ao_quant.kv_cache.KV_RECIPES`; "exact" or None rounds nothing.
        max_cache_len: memory for so many tokens is taken at once, and compiled code can use the cache; None: it
            grows.
        skip_layers: layers, by number, that stay in the dtype of the model; negative ones count from the end.
        offloading: layers are on the CPU while other layers compute; needs a GPU.

    Raises:
        ConfigError: `config` is not that of a model of transformers, `max_cache_len` or a layer does not exist.
        UnknownNameError: there is no such recipe.
        MissingExtraError: ao-quant is not installed.
    """

    def __init__(
        self,
        config: Any,
        kv: KVCacheConfig | str | None = "kv8",
        *,
        max_cache_len: int | None = None,
        skip_layers: Iterable[int] = (),
        offloading: bool = False,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(
                f"config={shown(config)}: use the configuration of a model of transformers, model.config"
            )
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise ConfigError(
                f"max_cache_len={max_cache_len!r}: use a positive number of tokens, or None for a cache that grows"
            )
        self.kv_config = _kv_config(kv)
        text = config.get_text_config(decoder=True)
        # of encoder-decoder models it is a copy, which never learns which attention is set
        named = text if text is config.get_text_config(decoder=True) else config
        types, options = get_layer_types_and_kwargs(text)
        skipped = _skipped(skip_layers, len(types))
        layers = []
        for index, (kind, option) in enumerate(zip(types, options, strict=True)):
            if kind == _QUANTIZED and index not in skipped:
                layers.append(
                    AoLayer(self.kv_config, named)
                    if max_cache_len is None
                    else AoStaticLayer(self.kv_config, named, max_cache_len)
                )
            elif max_cache_len is None:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**option))
            else:
                layers.append(STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=max_cache_len, **option))
        super().__init__(layers=layers, offloading=offloading)
        self.model_config = named
        ours = [index for index, layer in enumerate(layers) if isinstance(layer, AoLayer)]
        self._first, self._last = (ours[0], ours[-1]) if ours else (-1, -1)
        #: the thread that is between the first and the last layer of a forward
        self._thread: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add tokens to a layer; see `AoLayer.update`.

        Raises:
            ConfigError: there is no such layer, the tokens do not fit to those that are there, there is no
                memory for them, or another thread uses the cache.
        """
        if not torch.compiler.is_compiling():
            self._enter(layer_idx)
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last and not torch.compiler.is_compiling():
            self._thread = None
        return found

    def _enter(self, layer_idx: int) -> None:
        if layer_idx >= len(self.layers):
            raise ConfigError(
                f"layer {layer_idx} is written into a cache for {len(self.layers)} layers; it was made for "
                "another model: use AoCache(model.config)"
            )
        me = threading.get_ident()
        if self._thread is not None and self._thread != me:
            raise ConfigError(
                "two threads use one cache, or one of them failed within a forward; use a cache for each "
                "thread, or call reset()"
            )
        if layer_idx == self._first:
            counts = {
                x.tokens for x in self.layers if type(x) is AoLayer and x.kv is not None
            }
            if len(counts) > 1:
                raise ConfigError(
                    f"layers of this cache hold different numbers of tokens, {sorted(counts)}: a forward failed "
                    "within, or keys of a cross-attention go into the same cache. Call reset(), and use "
                    "AoEncoderDecoderCache(model.config) for a model with an encoder"
                )
            self._thread = me

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._thread = None

    def report(self) -> CacheReport:
        """Bytes, tokens and formats of each layer."""
        return CacheReport(tuple(layer_memory(i, layer) for i, layer in enumerate(self.layers)))

    def __repr__(self) -> str:
        found = self.report()
        return f"AoCache({len(self.layers)} layers, {found.tokens} tokens, {found.nbytes} bytes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> AoCache:
        memo[id(self.model_config)] = self.model_config  # it says which attention the model has now
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class AoEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]
    """Caches for the self-attention and the cross-attention of a model with an encoder, such as Whisper or T5.

    The keys and values of a cross-attention are quantized once. `EncoderDecoderCache` of two `AoCache` does the
    same, but it cannot crop, which assisted decoding needs.

    Args:
        config: `model.config`.
        kv: as for `AoCache`.
        max_cache_len: memory for so many tokens of the decoder; None: it grows.
        skip_layers: as for `AoCache`.
    """

    def __init__(
        self,
        config: Any,
        kv: KVCacheConfig | str | None = "kv8",
        *,
        max_cache_len: int | None = None,
        skip_layers: Iterable[int] = (),
    ) -> None:
        skipped = tuple(skip_layers)
        super().__init__(
            AoCache(config, kv, max_cache_len=max_cache_len, skip_layers=skipped),
            AoCache(config, kv, skip_layers=skipped),
        )

    def check_dynamic_cache(self, method: str) -> None:
        """Every method works on codes."""


def _kv_config(kv: KVCacheConfig | str | None) -> KVCacheConfig | None:
    try:
        from ao_quant.kv_cache import kv_config
    except ModuleNotFoundError as error:
        raise MissingExtraError("ao_quant", "ao-quant", "AoCache") from error
    return None if kv is None or kv == EXACT else kv_config(kv)


def _skipped(layers: Iterable[int], count: int) -> set[int]:
    found = set()
    for index in layers:
        if type(index) is not int or not -count <= index < count:
            raise ConfigError(
                f"skip_layers has {index!r}; this model has layers 0 to {count - 1}, and negative numbers count "
                "from the end"
            )
        found.add(index % count)
    return found

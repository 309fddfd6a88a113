"""`AoCache`: keys and values of all layers of a model, where layers that see the whole text are quantized."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

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

from ao_core.ext import ConfigError, checked_but, shown
from ao_core.ext.quantizing import NothingConvertedWarning, warn_caller
from ao_hf.cache.ahead import Ahead
from ao_hf.cache.keys import Findings
from ao_hf.cache.layers import AoLayer, AoStaticLayer, Settings
from ao_hf.cache.names import EXACT
from ao_hf.cache.recipes import Recipes, formats_of, numbered
from ao_hf.cache.report import CacheReport, layer_memory
from ao_hf.cache.stored import Stored

__all__ = ["AoCache", "AoEncoderDecoderCache"]


class AoCache(Cache):
    """A cache for `model.generate(…, past_key_values=cache)` and `model(…, past_key_values=cache)`.

    Layers that see the whole text keep keys and values in few bits; others are those of transformers. After
    `model.set_attn_implementation("ao_kv")` attention reads them as they are stored. With any other attention
    they are dequantized at each step: the same memory between steps, but slower.

    Args:
        config: `model.config`.
        kv: a `KVCacheConfig` or a name of `ao_quant.kv_cache.KV_RECIPES`; "exact" or None rounds nothing.
            Or a sequence of these, one for each layer, a mapping of the numbers of some layers to these, or a
            `CachePlan`: then layers with "exact", None or no entry stay in the dtype of the model.
        max_cache_len: memory for so many tokens is taken at once, and compiled code can use the cache; None:
            it grows.
        skip_layers: layers, by number, that stay in the dtype of the model; negative ones count from the
            end.
        largest_error: how far the logits of attention may be off, root mean square, by the keys of the first
            128 tokens of a layer. Beyond it keys take 8 bits per channel, or stay exact, and a
            `WiderKeysWarning` says so. Checked by the attention "ao_kv" only; math.inf: not checked.
        offloading: layers are on the CPU while other layers compute; needs a GPU.

    Warns:
        NothingConvertedWarning: no layer is quantized.

    Raises:
        ConfigError: `config` is not that of a model of transformers, a number is out of range, a layer does
            not exist or is never quantized, there are more or fewer recipes than layers, recipes have
            different windows, or layers are to be offloaded without a GPU.
        UnknownNameError: there is no such recipe.
        MissingExtraError: ao-quant is not installed.
    """

    @checked_but("config", "kv", "max_cache_len")
    def __init__(
        self,
        config: Any,
        kv: Recipes = "kv8",
        *,
        max_cache_len: int | None = None,
        skip_layers: Sequence[int] = (),
        largest_error: float = 0.5,
        offloading: bool = False,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(
                f"config={shown(config)}: use the configuration of a model of transformers, model.config"
            )
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise ConfigError(
                f"max_cache_len={max_cache_len!r}: use a positive number of tokens, or None for a cache that "
                "grows"
            )
        if not largest_error > 0:
            raise ConfigError(
                f"largest_error={largest_error!r}: use a positive number, and math.inf for no check"
            )
        if offloading and not torch.accelerator.is_available():
            raise ConfigError(
                "offloading=True: layers wait on the CPU while others compute on a GPU, and this machine has "
                "none; leave it out"
            )
        text = config.get_text_config(decoder=True)
        # of encoder-decoder models it is a copy, which never learns which attention is set
        named = text if text is config.get_text_config(decoder=True) else config
        types, options = get_layer_types_and_kwargs(text)
        formats = formats_of(kv, types)
        skipped = {numbered("skip_layers", index, len(types)) for index in skip_layers}
        ours = [i for i, x in enumerate(formats.layers) if x is not None and i not in skipped]
        if formats.asked and not ours:
            warn_caller(
                f"no layer of this {type(text).__name__} is quantized: none that is not skipped sees the "
                f"whole text; its layers are {', '.join(sorted(set(types)))}",
                NothingConvertedWarning,
            )
        findings = Findings(formats.name, largest_error, ours[-1] if ours else -1)
        alike: dict[Any, Any] = {}
        layers = []
        for index, (kind, option) in enumerate(zip(types, options, strict=True)):
            own = formats.layers[index]
            if own is not None and index in ours:
                settings = Settings(own.config, named, largest_error, findings, own.name, alike)
                layers.append(
                    AoLayer(index, settings)
                    if max_cache_len is None
                    else AoStaticLayer(index, settings, max_cache_len)
                )
            elif max_cache_len is None:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**option))
            else:
                layers.append(
                    STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=max_cache_len, **option)
                )
        super().__init__(layers=layers, offloading=offloading)
        #: the configuration of the model, which names its attention
        self.model_config = named
        #: what was found about the keys of its layers
        self.findings = findings
        self._last = ours[-1] if ours else -1
        #: within a forward: the thread that runs it, and the last layer that was written
        self._forward: dict[str, int] = {}
        #: what was found for layers that the model did not come to yet
        self.ahead: Ahead | None = None
        #: whether layers may get tokens before the model comes to them
        self.runs_ahead = True
        #: whether programs of ao write the tokens, so that nobody else need compile
        self.stepped = False

    @property
    def is_compileable(self) -> bool:
        """Whether transformers may prepare for compiled code, which takes a mask for all of its memory."""
        return super().is_compileable and not self.stepped

    @property
    def is_exact(self) -> bool:
        """Whether all layers keep all tokens as they are, where every attention can read them."""
        return all(isinstance(x, AoLayer) and x.is_exact for x in self.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Add tokens to a layer; see `AoLayer.update`.

        Raises:
            ConfigError: there is no such layer, the tokens do not fit to those that are there, there is no
                memory for them, or another thread uses the cache.
        """
        if torch.compiler.is_compiling() or not self._enters(layer_idx):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.settle()
        with self._written(layer_idx):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @contextmanager
    def _written(self, layer_idx: int) -> Iterator[None]:
        """A time in which a layer is written to, the next one of a forward."""
        before = self._forward.get("layer")
        try:
            yield
        except BaseException:
            if before is None:
                self._forward.clear()  # nothing was written yet
            raise
        self._reach(layer_idx)

    def _reach(self, layer_idx: int) -> None:
        self._forward["layer"] = layer_idx
        if layer_idx == self._last:
            self._forward.clear()

    @contextmanager
    def writing(self, layer_idx: int, reached: int) -> Iterator[None]:
        """A time in which the layers from one on get tokens without `update`, by a run of fused blocks.

        Args:
            layer_idx: the first one.
            reached: the last one that the model came to by then.

        Raises:
            ConfigError: as `update`.
        """
        self._enters(layer_idx)
        with self._written(reached):
            yield

    def reached(self, ahead: Ahead) -> None:
        """The model came to the next layer of those that hold its tokens already."""
        self._reach(ahead.layers[ahead.called - 1].index)
        if ahead.called == len(ahead.layers):
            self.ahead = None

    def settle(self) -> None:
        """Forget the tokens of layers that the model did not come to, and let none get ahead from now on."""
        if self.ahead is not None:
            ahead, self.ahead = self.ahead, None
            self.runs_ahead = False
            ahead.undo()

    def _enters(self, layer_idx: int) -> bool:
        """Whether this is a layer of ours, which this thread may write now."""
        if layer_idx >= len(self.layers):
            raise ConfigError(
                f"layer {layer_idx} is written into a cache for {len(self.layers)} layers; it was made for "
                "another model: use AoCache(model.config)"
            )
        if not isinstance(self.layers[layer_idx], AoLayer):
            return False
        me = threading.get_ident()
        if (
            self._forward.setdefault("thread", me) != me
        ):  # one step, which no other thread interrupts
            raise ConfigError(
                "two threads use one cache, or a forward failed in another thread; use one cache for each "
                "thread, or call reset()"
            )
        if self._forward.get("layer", -1) >= layer_idx:
            raise ConfigError(
                f"layer {layer_idx} is written twice in one forward, or the last forward failed within. Call "
                "reset() after a failure, and use AoEncoderDecoderCache(model.config) for a model with an "
                "encoder, whose cross-attention needs a cache of its own"
            )
        return True

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._forward.clear()
        self.ahead, self.runs_ahead = None, True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, whose number is given as a negative one, or 0.

        Raises:
            ConfigError: a layer of transformers cannot forget.
            ValueError: the number is positive.
        """
        self.settle()
        for index, layer in enumerate(self.layers):
            if tokens_to_remove and not hasattr(layer, "crop"):
                raise ConfigError(
                    f"layer {index} is a {type(layer).__name__} of transformers, which cannot forget tokens; "
                    "use a cache without max_cache_len"
                )
        for layer in self.layers:
            if hasattr(layer, "crop"):
                layer.crop(tokens_to_remove)

    def report(self) -> CacheReport:
        """Bytes, tokens and formats of each layer."""
        self.settle()
        return CacheReport(tuple(layer_memory(i, layer) for i, layer in enumerate(self.layers)))

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        """As that of transformers: dense keys and values, and the window, of each layer that has them."""
        self.settle()
        for layer in self.layers:
            both = (getattr(layer, name, None) for name in ("keys", "values"))
            key, value = (x.dense() if isinstance(x, Stored) else x for x in both)
            yield key, value, getattr(layer, "_sliding_window_tensor", None)

    def __repr__(self) -> str:
        found = self.report()
        return f"AoCache({len(self.layers)} layers, {found.tokens} tokens, {found.nbytes} bytes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> AoCache:
        self.settle()
        config = self.model_config
        memo[id(config)] = config  # it says which attention the model has now
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class AoEncoderDecoderCache(EncoderDecoderCache):
    """Caches for the self-attention and the cross-attention of a model with an encoder, as Whisper and T5.

    The keys and values of a cross-attention are quantized once, all of them. `EncoderDecoderCache` of two
    `AoCache` does the same but for a window of exact tokens, and cannot crop, which assisted decoding needs.

    Args:
        config: `model.config`.
        kv: as for `AoCache`.
        max_cache_len: memory for so many tokens of the decoder; None: it grows.
        skip_layers: as for `AoCache`.
    """

    @checked_but("config", "kv", "max_cache_len")
    def __init__(
        self,
        config: Any,
        kv: Recipes = "kv8",
        *,
        max_cache_len: int | None = None,
        skip_layers: Sequence[int] = (),
    ) -> None:
        skipped = tuple(skip_layers)
        own = AoCache(config, kv, max_cache_len=max_cache_len, skip_layers=skipped)
        found = [x.settings.kv_config if isinstance(x, AoLayer) else None for x in own.layers]
        crossed = [None if x is None else replace(x, window=0) for x in found]
        exact = kv is None or kv == EXACT
        super().__init__(own, AoCache(config, kv if exact else crossed, skip_layers=skipped))

    def check_dynamic_cache(self, method: str) -> None:
        """Every method works on codes."""

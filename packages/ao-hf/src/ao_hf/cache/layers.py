"""The layers of an `AoCache` that are quantized: what transformers asks of a layer, on codes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ao_core import WHOLE, Spec
from ao_core.ext import NO_SCALE, ConfigError
from ao_hf.cache.functions import functions
from ao_hf.cache.keys import BLOCK, Findings, Trial, logit_error, wider
from ao_hf.cache.names import ATTENTION
from ao_hf.cache.stored import Stored, stored

if TYPE_CHECKING:
    from ao_quant.kv_cache import KVCacheConfig, QuantizedKV

__all__ = ["AoLayer", "AoStaticLayer", "Settings"]

#: formats that store values of a dtype as they are
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Settings:
    """What a layer of a cache is made by, of which layers share all but the formats."""

    #: the formats; None: values as they are
    kv_config: KVCacheConfig | None
    #: the configuration of the model, which names its attention
    model_config: Any
    #: how far logits may be off before keys are kept wider
    largest_error: float
    findings: Findings
    #: name of the recipe
    recipe: str
    #: shape of rows, dtype -> an empty cache of that kind, from which exact layers are made
    alike: dict[Any, QuantizedKV] = field(default_factory=dict)

    @property
    def checks(self) -> bool:
        """Whether keys are checked."""
        return self.kv_config is not None and self.largest_error < math.inf


class AoLayer(CacheLayerMixin):
    """Keys and values of one layer, which grow with the text.

    Args:
        index: the number of the layer.
        settings: its formats, and what all layers share.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, index: int, settings: Settings) -> None:
        # not that of the base class, whose `keys` and `values` are attributes
        self.index = index
        self.settings = settings
        self.functions = functions()
        self.kv: QuantizedKV | None = None
        #: whether all tokens are in the exact tail, one after the other
        self.is_exact = False
        #: how many tokens there are; not in a static layer, whose number is a tensor
        self.tokens = 0
        #: whether the keys of the first block are still to be checked, and what that needs
        self.unchecked = settings.checks
        self.trial: Trial | None = None

    # -- what there is -----------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether there is memory."""
        return self.kv is not None

    @property
    def is_croppable(self) -> bool:
        """Whether forgetting the last token leaves no trace."""
        config = self.settings.kv_config
        return config is None or config.window > 0

    @property
    def length(self) -> int:
        """How many tokens attention gets."""
        return self.tokens

    @property
    def keys(self) -> Stored | None:
        """All keys; models with a cross-attention take them from here after the first step."""
        return None if self.kv is None else stored(self, self.kv)[0]

    @property
    def values(self) -> Stored | None:
        """All values, likewise."""
        return None if self.kv is None else stored(self, self.kv)[1]

    def dense(self, kv: QuantizedKV) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values (B, Hkv, `length`, ·); of an exact cache, views of its memory."""
        if self.is_exact:
            tokens = self.tokens or kv.tokens
            return kv.tail_key[:, :, :tokens], kv.tail_value[:, :, :tokens]
        return self.functions.dequantized(kv)  # type: ignore[no-any-return]

    def get_seq_length(self) -> int | Tensor:
        """How many tokens there are."""
        return self.tokens

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens attention gets in the next step, and which one is the first."""
        return self.tokens + query_length, 0

    # -- tokens ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory for tokens like these."""
        self.kv = self._new(key_states, value_states, max(key_states.shape[2], 1))

    def _new(self, key: Tensor, value: Tensor, capacity: int) -> QuantizedKV:
        dtype, config = _dtype(key), self.settings.kv_config
        # kernels of other devices read blocks of exact tokens faster than a long tail
        self.is_exact = config is None and key.device.type == "cpu"
        if not self.is_exact:
            return self._made(config or self._exact(dtype), key, value, capacity, dtype)
        # all layers share the memory for blocks, which none will have
        alike, kind = self.settings.alike, (*key.shape[:2], key.shape[3], value.shape[3], dtype)
        if kind not in alike:
            alike.clear()
            config = self.functions.KVCacheConfig(window=0, center=False)
            alike[kind] = self._made(config, key, value, 1, dtype)
        with torch.inference_mode(False):
            # in whole blocks, of which the tail has one more: memory for 127 tokens besides the first ones
            return self.functions.exact_like(  # type: ignore[no-any-return]
                alike[kind], -(-capacity // BLOCK) * BLOCK
            )

    def _made(
        self, config: KVCacheConfig, key: Tensor, value: Tensor, capacity: int, dtype: torch.dtype
    ) -> QuantizedKV:
        # tensors that are made in inference mode could not be written outside of it
        with torch.inference_mode(False):
            return self.functions.new_kv(  # type: ignore[no-any-return]
                config,
                key.shape[0],
                key.shape[1],
                key.shape[3],
                capacity,
                value_dim=value.shape[3],
                dtype=dtype,
                device=key.device,
            )

    def _exact(self, dtype: torch.dtype) -> KVCacheConfig:
        spec = _exact_spec(dtype)
        return self.functions.KVCacheConfig(spec, spec, center=False)  # type: ignore[no-any-return]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | Stored, Tensor | Stored]:
        """Add the keys (B, Hkv, T, D) and values (B, Hkv, T, Dv) of T tokens.

        Returns:
            All keys and all values: `Stored` for the attention "ao_kv" and where the model names none, else
            dense tensors.
        """
        if self.kv is None:
            self.lazy_initialization(key_states, value_states)
        assert self.kv is not None
        if _autocasts(key_states):
            key_states, value_states = (x.to(_dtype(x)) for x in (key_states, value_states))
        attention = self.settings.model_config._attn_implementation
        trial, traced = None, torch.compiler.is_compiling()
        if self.unchecked and attention == ATTENTION and not traced:
            trial = self._tried(self.kv, key_states, value_states)
        self._append(self.kv, key_states, value_states)
        self.trial = trial
        if self.is_exact and attention not in (ATTENTION, None) and not traced:
            return self.dense(self.kv)
        keys, values = stored(self, self.kv)
        if attention in (ATTENTION, None):
            return keys, values
        return keys.dense(), values.dense()

    def _append(self, kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
        total = self.tokens + key.shape[2]
        if total > (kv.window + BLOCK - 1 if self.is_exact else kv.capacity):
            larger = self.functions.widened if self.is_exact else self.functions.grown
            with torch.inference_mode(False):
                kv = larger(kv, total + max(total // 4, 512))
        self.functions.append_(kv, key, value)
        self.kv, self.tokens = kv, total

    # -- keys that do not survive ------------------------------------------------------------------

    def _tried(self, kv: QuantizedKV, key: Tensor, value: Tensor) -> Trial | None:
        """What checks the first block, if these tokens complete it."""
        tokens, due = kv.tokens, BLOCK + kv.window
        if not tokens < due <= tokens + key.shape[2]:
            self.unchecked = tokens < due
            return None
        # all tokens before are exact: none of them is in a block
        return Trial(
            self.functions.dequantized(kv), (key.detach(), value.detach()), due - 1 - tokens
        )

    def checked(self, query: Tensor, scale: float | None) -> QuantizedKV:
        """The cache after the keys of its first block were checked by a query, in wider keys if need be."""
        kv, trial, config = self.kv, self.trial, self.settings.kv_config
        assert kv is not None
        assert trial is not None
        assert config is not None
        self.trial, self.unchecked = None, False
        bound = self.settings.largest_error
        scale = query.shape[3] ** -0.5 if scale is None else scale
        row = query[:, :, min(trial.query, query.shape[2] - 1)]
        key, value = (torch.cat(both, 2) for both in zip(trial.before, trial.new, strict=True))
        first = error = logit_error(kv, key[:, :, :BLOCK], row, scale)
        done = ""
        for wide, words in wider(config, _exact_spec(kv.dtype)):
            if error <= bound:
                break
            kv, done = self._made(wide, key, value, kv.capacity, kv.dtype), words
            self.functions.append_(kv, key, value)
            error = logit_error(kv, key[:, :, :BLOCK], row, scale)
        if done:
            self.settings.findings.wider[self.index] = (first, done)
            self.kv = kv
            self._placed(kv)
        self.settings.findings.say(self.index)
        return kv

    def _placed(self, kv: QuantizedKV) -> None:
        """Nothing: these tensors are replaced when they grow."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, whose number is given as a negative one, or 0.

        Raises:
            ValueError: the number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove}: use minus the number of tokens, or 0"
            )
        if self.kv is not None and tokens_to_remove:
            self.tokens = max(self.kv.tokens + tokens_to_remove, 0)
            self.functions.crop_(self.kv, self.tokens)

    def reset(self) -> None:
        """Forget everything, the size of the batch and the dtype too."""
        self.kv, self.tokens, self.trial = None, 0, None
        self.unchecked = self.settings.checks
        self.settings.findings.wider.pop(self.index, None)

    # -- rows of the batch -------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put these rows in the place of all rows."""
        if self.kv is not None:
            self.functions.reorder_(self.kv, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.kv is not None:
            with torch.inference_mode(False):
                self.kv = self.functions.repeat(self.kv, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: numbers of rows, negative ones from the end, or one bool for each row."""
        if self.kv is not None:
            with torch.inference_mode(False):
                rows = torch.arange(self.kv.batch, device=self.kv.device)
                self.kv = self.functions.select(self.kv, rows[indices.to(self.kv.device)])

    # -- devices -----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move everything to the CPU; attention that was given the tokens before still has them."""
        if self.kv is not None and self.kv.device.type != "cpu":
            self._home = self.kv.device
            self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move it back."""
        home = getattr(self, "_home", None)
        if self.kv is not None and home is not None and self.kv.device != home:
            self._move(home)

    def _move(self, device: torch.device) -> None:
        assert self.kv is not None
        with torch.inference_mode(False):
            moved = [x.to(device, non_blocking=True) for x in self.kv.tensors()]
            self.kv = self.kv.with_tensors(moved)


class AoStaticLayer(AoLayer):
    """The same with memory for a fixed number of tokens, which compiled code can use.

    Args:
        index: the number of the layer.
        settings: its formats, and what all layers share.
        max_cache_len: how many tokens there is memory for.
    """

    is_compileable = True

    def __init__(self, index: int, settings: Settings, max_cache_len: int) -> None:
        super().__init__(index, settings)
        self.max_cache_len = max_cache_len

    @property
    def length(self) -> int:
        """Attention gets all memory, with a mask or the number of tokens."""
        return self.max_cache_len

    def dense(self, kv: QuantizedKV) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values (B, Hkv, `max_cache_len`, ·), 0 where there are no tokens."""
        key, value = (
            F.pad(x, (0, 0, 0, self.max_cache_len - x.shape[2])) for x in super().dense(kv)
        )
        return key, value

    def get_seq_length(self) -> int | Tensor:
        """How many tokens there are: a tensor, since compiled code is compiled for all numbers."""
        return 0 if self.kv is None else self.kv.counts[0].clone()

    def get_max_length(self) -> int:
        """How many tokens there is memory for."""
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many tokens attention gets, and which one is the first."""
        return self.max_cache_len, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory for all tokens, in rows like these."""
        self.kv = self._new(key_states, value_states, self.max_cache_len)
        if not torch.compiler.is_compiling():
            self._placed(self.kv)

    def _placed(self, kv: QuantizedKV) -> None:
        for tensor in kv.tensors():
            # else CUDA graphs would copy the cache; unguarded, so that another cache compiles nothing. It is
            # what `torch._dynamo.mark_static_address` does, whose import takes seconds
            tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]

    def _append(self, kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
        if not torch.compiler.is_compiling():
            tokens = kv.tokens
            total = tokens + key.shape[2]
            if total > self.max_cache_len:
                raise ConfigError(
                    f"{key.shape[2]} tokens after {tokens} are {total}, and this cache has memory for "
                    f"{self.max_cache_len}; make it with max_cache_len={total} or more, or with None, so "
                    "that it grows"
                )
        self.functions.append_(kv, key, value)

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        if self.kv is not None:
            self.functions.reset_(self.kv)
        self.trial = None


def _dtype(x: Tensor) -> torch.dtype:
    """That of a cache: what products are computed in under autocast, where keys and values may differ."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if _autocasts(x) else x.dtype


def _autocasts(x: Tensor) -> bool:
    kind = x.device.type  # which may be "meta", of which torch knows no autocast
    if kind == "cpu":
        return torch.is_autocast_enabled(kind)
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _exact_spec(dtype: torch.dtype) -> Spec:
    """The format that stores values of a dtype as they are."""
    return Spec(_FORMATS.get(dtype, "fp32"), (1, WHOLE), NO_SCALE)

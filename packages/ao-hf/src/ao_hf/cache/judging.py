"""What a model loses with some layers of its cache in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext import AoError, ConfigError, QuantizationError, shown
from ao_core.ext.calibration import call
from ao_hf.cache.caches import AoCache
from ao_hf.cache.functions import solving
from ao_hf.cache.keys import BLOCK
from ao_hf.cache.layers import AoLayer
from ao_hf.cache.names import EXACT
from ao_hf.cache.prefixes import Prefix, blocks_of, recorded
from ao_hf.cache.report import CacheReport

if TYPE_CHECKING:
    from torch import nn

    from ao_quant.kv_cache import KVCacheConfig

__all__ = ["Judge", "Measured", "Row"]

#: positions of answers by which whole plans are compared: batches beyond that are left out
_POSITIONS = 1024
#: positions by which layers are compared with each other
_PART = 256


class Measured(NamedTuple):
    """What is lost with some layers in fewer bits."""

    #: divergence in bits per position
    loss: float
    #: of the cache for the last batch
    report: CacheReport


class Row(NamedTuple):
    """What one token of one row takes in a layer that is exact."""

    layer: int
    #: of key and value
    elements: int
    bytes_per_token: float


@dataclass(frozen=True)
class Judge:
    """A model, some batches, and what it answers to them with exact keys and values.

    Within its use the model is in evaluation mode, and its attention is "ao_kv".
    """

    model: Any
    batches: tuple[dict[str, Any], ...]
    #: logits (positions, classes)
    right: tuple[Tensor, ...]
    #: how many layers a cache has, and those that can be quantized
    layers: int
    planned: tuple[Row, ...]
    #: what blocks return for the first batches, by which layers are compared; empty: passes are whole
    prefixes: tuple[Prefix, ...]

    @classmethod
    def of(cls, model: Any, batches: Sequence[dict[str, Any]], *, alone: bool) -> Judge:
        """The judge by as many batches as give enough positions; at least one.

        Args:
            model: a decoder.
            batches: arguments of the model.
            alone: whether layers are going to be measured alone.

        Raises:
            ConfigError: the model cannot be called with a batch, its answers have no logits, no layer can be
                quantized, or a batch is too short.
            QuantizationError: answers have NaN or inf.
        """
        count = len(AoCache(model.config, EXACT).layers)
        right, planned, prefixes = list[Tensor](), tuple[Row, ...](), list[Prefix | None]()
        blocks: tuple[nn.Module, ...] = blocks_of(model, count) if alone else ()
        for place, batch in enumerate(batches):
            cache = AoCache(model.config, [None] * count)
            part = sum(map(len, right)) < _PART
            with recorded(blocks if part else ()) as seen:
                right.append(_answer(model, batch, cache))
            if part:
                prefixes.append(seen.prefix())
            tokens = int(cache.get_seq_length())
            if tokens < BLOCK:
                raise ConfigError(
                    f"data[{place}] has {tokens} tokens, and keys and values are quantized in blocks of "
                    f"{BLOCK}: give batches of so many tokens at least, such as 256 or 512"
                )
            planned = planned or _planned(model, cache)
            if sum(map(len, right)) >= _POSITIONS:
                break
        found = tuple(prefix for prefix in prefixes if prefix is not None)
        whole = len(found) < len(prefixes)
        used = tuple(batches[: len(right)])
        return cls(model, used, tuple(right), count, planned, () if whole else found)

    def measured(self, formats: Mapping[int, KVCacheConfig | None]) -> Measured:
        """What is lost with these layers in these formats, by all batches."""
        return self._measured(formats, len(self.batches))

    def alone(self, layer: int, config: KVCacheConfig) -> Measured:
        """What is lost with one layer in a format, by the first batches."""
        ends = [sum(map(len, self.right[: i + 1])) for i in range(len(self.right))]
        return self._measured({layer: config}, sum(end < _PART for end in ends) + 1)

    def checked(self, config: KVCacheConfig) -> Judge:
        """This judge, with whole passes if shorter ones find something else with a layer in a format."""
        if not self.prefixes:
            return self
        whole = replace(self, prefixes=())
        for row in (self.planned[len(self.planned) // 2], self.planned[-1]):
            try:
                found = self.alone(row.layer, config).loss
            except AoError:  # a block reads what one that was skipped did not make
                return whole
            if found != whole.alone(row.layer, config).loss:
                return whole
        return self

    def _measured(self, formats: Mapping[int, KVCacheConfig | None], count: int) -> Measured:
        total, positions, alone = 0.0, 0, len(formats) == 1
        count = min(count, len(self.batches))
        for place, (batch, right) in enumerate(zip(self.batches[:count], self.right, strict=False)):
            cache = AoCache(self.model.config, formats)
            cache.findings.last = -1  # what becomes of keys is part of the option, and no news
            if alone and place < len(self.prefixes):
                with self.prefixes[place].skipped(min(formats)):
                    found = _answer(self.model, batch, cache)
            else:
                found = _answer(self.model, batch, cache)
            total += solving().divergence(right, found)
            positions += len(right)
        return Measured(total / positions, cache.report())

    @property
    def positions(self) -> int:
        """Positions of the answers that are compared."""
        return sum(map(len, self.right))


def _answer(model: Any, batch: dict[str, Any], cache: AoCache) -> Tensor:
    """The logits (positions, classes) of the positions that are no padding."""
    out = call(model, {**batch, "past_key_values": cache, "use_cache": True}, "data")
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ConfigError(
            f"model={shown(model)}: its answer has no logits of each position; plan a cache with the model "
            "that generates text, such as a …ForCausalLM"
        )
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == logits.shape[:2]:
        logits = logits[mask.to(logits.device, torch.bool)]
    logits = logits.reshape(-1, logits.shape[-1])
    if not bool(logits.isfinite().all()):
        formats = ", ".join(f"layer {x.index} in {x.settings.recipe}" for x in _quantized(cache))
        raise QuantizationError(
            f"the model answers data with NaN or inf, with {formats or 'exact keys and values'}; "
            f"{'leave that candidate out' if formats else 'there is nothing to compare'}"
        )
    return logits


def _quantized(cache: AoCache) -> list[AoLayer]:
    return [layer for layer in cache.layers if isinstance(layer, AoLayer)]


def _planned(model: Any, cache: AoCache) -> tuple[Row, ...]:
    """The layers that can be quantized, by a cache that holds some tokens in exact layers."""
    rows = []
    for layer in _quantized(AoCache(model.config, EXACT)):
        both = [getattr(cache.layers[layer.index], name, None) for name in ("keys", "values")]
        found = [x for x in both if isinstance(x, Tensor) and x.dim() == 4 and x.numel()]
        if len(found) == 2:  # others never get tokens: they read those of another layer
            elements = sum(x.shape[1] * x.shape[3] for x in found)
            rows.append(Row(layer.index, elements, float(elements * found[0].element_size())))
    if not rows:
        raise ConfigError(
            f"model={shown(model)}: none of its layers sees the whole text and has keys and values; there is "
            "nothing to plan"
        )
    return tuple(rows)

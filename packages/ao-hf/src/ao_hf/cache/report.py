"""What an `AoCache` holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor

__all__ = ["CacheReport", "LayerMemory", "layer_bytes", "layer_memory", "ranges"]


@dataclass(frozen=True)
class LayerMemory:
    """One layer of a cache."""

    layer: int
    #: formats of keys and values, or the class of a layer of transformers
    key: str
    value: str
    tokens: int
    #: of the memory that is taken, with what no token is in yet
    nbytes: int
    #: bytes that one more token of one row takes in a block; None where ao keeps nothing
    bytes_per_token: float | None
    #: what was changed about the layer, and why
    note: str = ""
    #: name of the recipe; empty where ao keeps nothing
    recipe: str = ""


@dataclass(frozen=True)
class CacheReport:
    """All layers of a cache."""

    layers: tuple[LayerMemory, ...]

    @property
    def nbytes(self) -> int:
        """Of all layers."""
        return sum(x.nbytes for x in self.layers)

    @property
    def tokens(self) -> int:
        """The most that a layer holds."""
        return max((x.tokens for x in self.layers), default=0)

    @property
    def bytes_per_token(self) -> float:
        """Of all quantized layers, for one row."""
        return sum(x.bytes_per_token or 0.0 for x in self.layers)

    def __str__(self) -> str:
        lines = [f"{self.tokens} tokens, {self.nbytes} bytes"]
        alike: dict[LayerMemory, list[int]] = {}
        for x in self.layers:
            alike.setdefault(replace(x, layer=0), []).append(x.layer)
        for x, layers in alike.items():
            per = "" if x.bytes_per_token is None else f", {x.bytes_per_token:g} per token"
            note = f"; {x.note}" if x.note else ""
            name, each = ("layer", "") if len(layers) == 1 else ("layers", " each")
            lines.append(
                f"{name} {ranges(layers)}: {x.recipe and f'{x.recipe}, '}{x.tokens} tokens, {x.nbytes} bytes"
                f"{each}{per}, keys {x.key}, values {x.value}{note}"
            )
        return "\n".join(lines)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order as text: "0-3, 7"."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{x[0]}" if len(x) == 1 else f"{x[0]}-{x[-1]}" for x in ends)


def layer_bytes(layer: Any) -> int:
    """Bytes that a layer of ours or of transformers takes, with what no token is in yet."""
    from ao_hf.cache.layers import AoLayer

    if isinstance(layer, AoLayer):
        return 0 if layer.kv is None else layer.kv.stored_bytes
    tensors = [x for x in vars(layer).values() if isinstance(x, Tensor)]
    for states in (x for x in vars(layer).values() if isinstance(x, dict)):
        tensors += [x for x in states.values() if isinstance(x, Tensor)]
    return sum(x.nbytes for x in tensors)


def layer_memory(index: int, layer: Any) -> LayerMemory:
    """What a layer of ours or of transformers holds."""
    from ao_hf.cache.layers import AoLayer

    size = layer_bytes(layer)
    if not isinstance(layer, AoLayer):
        name = type(layer).__name__
        count = getattr(layer, "get_seq_length", int)()
        return LayerMemory(index, name, name, int(count), size, None)
    if layer.kv is None:
        return LayerMemory(index, "-", "-", 0, size, None, recipe=layer.settings.recipe)
    kv, functions, recipe = layer.kv, layer.functions, layer.settings.recipe
    if layer.is_exact:
        name, row = str(kv.dtype).removeprefix("torch."), kv.tail_key.shape[1] * kv.dtype.itemsize
        each = float(row * (kv.tail_key.shape[3] + kv.tail_value.shape[3]))
        return LayerMemory(index, name, name, kv.tokens, size, each, recipe=recipe)
    formats = str(kv.key.spec), str(kv.value.spec)
    each = functions.bytes_per_token(kv)
    return LayerMemory(index, *formats, kv.tokens, size, each, _note(layer), recipe)


def _note(layer: Any) -> str:
    found = layer.settings.findings.wider.get(layer.index)
    return "" if found is None else f"keys are {found[1]}, since logits were off by {found[0]:.3g}"

"""Keys that do not survive their format: found at the first block of a layer, and kept in a wider one.

What counts is the error of the logits of attention, not that of the keys. Where keys have large biases, as
those of Qwen2, one scale for all of a key makes the rest of it vanish, yet its relative error is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext.quantizing import warn_caller

if TYPE_CHECKING:
    from ao_quant.kv_cache import KVCacheConfig, QuantizedKV

__all__ = ["BLOCK", "Findings", "Trial", "WiderKeysWarning", "logit_error", "wider"]

#: tokens of a block
BLOCK = 128
_PER_CHANNEL = Spec("int8", (BLOCK, 1), "float16")


class WiderKeysWarning(UserWarning):
    """The keys of some layers do not survive the format of a cache, and take more bits."""


@dataclass
class Trial:
    """The exact tokens of a layer when its first block is quantized, until attention has a query for them."""

    #: tokens before, (B, Hkv, t, ·), and those of this forward
    before: tuple[Tensor, Tensor]
    new: tuple[Tensor, Tensor]
    #: the query of the token that completes the block and the window, among those of this forward
    query: int


@dataclass
class Findings:
    """What was found about the layers of one cache."""

    #: name of the formats that were asked for
    name: str
    #: how far logits may be off
    bound: float
    #: the layer after whose attention it is said
    last: int
    #: layer -> its error, and what was done
    wider: dict[int, tuple[float, str]] = field(default_factory=dict)

    def say(self, layer: int) -> None:
        """Warn of all layers, after the last one.

        Warns:
            WiderKeysWarning: there are such layers.
        """
        if layer != self.last or not self.wider:
            return
        found = ", ".join(
            f"layer {i} (off by {error:.3g}, now {done})" for i, (error, done) in self.wider.items()
        )
        warn_caller(
            f"with the keys of {self.name}, logits of attention are off by more than {self.bound:g}, root "
            f"mean square; wider keys are used in {found}. Large biases cause this, as the keys of Qwen2 "
            f"have them. AoCache(…, skip_layers={list(self.wider)}) keeps these layers exact; largest_error "
            "is the bound",
            WiderKeysWarning,
        )


@torch.no_grad()
def logit_error(kv: QuantizedKV, exact: Tensor, query: Tensor, scale: float) -> float:
    """How far the logits of a query over the first block are off, root mean square, less what all share.

    Args:
        kv: a cache that has at least one block.
        exact: the keys of the block before they were quantized, (B, Hkv, 128, D).
        query: (B, Hq, D).
        scale: factor of q·k.
    """
    block = cast("QTensor", kv.key.tensor().narrow(2, 0, BLOCK)).dequantize(torch.float32)
    off = block - exact.float() if kv.center is None else block + kv.center - exact.float()
    rows, heads, dim = off.shape[0], off.shape[1], off.shape[3]
    logits = query.float().reshape(rows, heads, -1, dim) @ off.transpose(2, 3) * scale
    logits = logits - logits.mean(-1, keepdim=True)
    error = float(logits.square().mean().sqrt())
    return error if math.isfinite(error) else math.inf


def wider(config: KVCacheConfig, exact: Spec) -> list[tuple[KVCacheConfig, str]]:
    """Configurations with wider keys, in the order in which they are tried; the last one rounds nothing."""
    values = "value" if config.rotate in ("value", "both") else "none"
    return [
        (replace(config, key=_PER_CHANNEL, center=True, rotate=values), "int8 per channel"),
        (replace(config, key=exact, center=False, rotate=values), "exact"),
    ]

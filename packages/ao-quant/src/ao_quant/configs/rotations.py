"""The configuration of rotations, which take outliers out of activations and weights."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core import Config
from ao_core.ext import ConfigError
from ao_core.ext.numerics import has_hadamard

__all__ = ["RotateConfig"]

#: words for `RotateConfig.online`
ONLINE = ("needed", "all", "none")


@dataclass(frozen=True)
class RotateConfig(Config):
    """Rotate channels by random Hadamard matrices, before weights (and activations) are quantized.

    The model computes the same. Rotated channels have no outliers, so that 4 bits hold them better.

    - the residual stream (R1): into embeddings, all weights that read or write the stream, and the head.
      Gains of norms move into what reads them first, and a head that is tied to an embedding becomes a weight
      of its own.
    - values (R2): into the weights of values and of attention's output, head by head.
    - inputs that no weight can rotate (R4), such as that of `down_proj`: a "hadamard" input step of it.

    Keys and queries (R3) are rotated by the cache that quantizes them: `KVCacheConfig(rotate="both")`.

    Reference: Ashkboos et al. 2024, arXiv:2404.00456; Liu et al. 2024, arXiv:2405.16406.

    Attributes:
        residual: whether the residual stream is rotated.
        values: whether values, and other channels between two weights, are.
        online: "needed", inputs that no weight can rotate; "all", inputs of all weights that are quantized;
            "none"; or patterns of names of modules, as ("*.down_proj",).
        block: channels that are rotated together, for formats whose groups are as small, such as 32 of MXFP4;
            None: all.
        seed: of the random signs.
    """

    residual: bool = True
    values: bool = True
    online: str | tuple[str, ...] = "needed"
    block: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.online, str) and self.online not in ONLINE:
            choices = ", ".join(map(repr, ONLINE))
            raise ConfigError(
                f"online={self.online!r}: use one of {choices}, or a tuple of patterns such as "
                "('*.down_proj',)"
            )
        if self.online in ("none", ()) and not (self.residual or self.values):
            raise ConfigError(
                f"online={self.online!r} with residual=False and values=False: nothing would be rotated"
            )
        if self.block is not None and (self.block < 2 or not has_hadamard(self.block)):
            raise ConfigError(
                f"block={self.block!r}: there is no such Hadamard matrix; use a power of two, as 32"
            )

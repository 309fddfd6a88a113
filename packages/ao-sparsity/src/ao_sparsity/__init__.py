"""2:4, block and unstructured sparsity: pruning, sparse training, smaller layouts; built on ao-core."""

from __future__ import annotations

from ao_sparsity.__about__ import __version__
from ao_sparsity.remove import (
    ChannelGroup,
    RemovalError,
    RemovalReport,
    channel_groups,
    ln_structured,
    remove_channels,
)

__all__ = [
    "ChannelGroup",
    "RemovalError",
    "RemovalReport",
    "__version__",
    "channel_groups",
    "ln_structured",
    "remove_channels",
]

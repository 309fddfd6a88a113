"""Structured removal: channels, features and heads are cut out of a model."""

from __future__ import annotations

from ao_sparsity.remove.choosing import Channels, Kept, ln_structured
from ao_sparsity.remove.errors import RemovalError
from ao_sparsity.remove.groups import ChannelGroup, Site, channel_groups
from ao_sparsity.remove.removal import remove_channels
from ao_sparsity.remove.report import RemovalReport, Removed

__all__ = [
    "ChannelGroup",
    "Channels",
    "Kept",
    "RemovalError",
    "RemovalReport",
    "Removed",
    "Site",
    "channel_groups",
    "ln_structured",
    "remove_channels",
]

"""Shapes of well-known models, with random weights: speed and memory need no others."""

from __future__ import annotations

from ao_hf.generation.presets.random import (
    cache_bytes_of,
    random_model,
    skeleton,
    stored_bytes,
)
from ao_hf.generation.presets.records import Forward, Preset
from ao_hf.generation.presets.table import PRESETS, find_preset

__all__ = [
    "PRESETS",
    "Forward",
    "Preset",
    "cache_bytes_of",
    "find_preset",
    "random_model",
    "skeleton",
    "stored_bytes",
]

"""All presets by name."""

from __future__ import annotations

from ao_core.ext import UnknownNameError
from ao_hf.generation.presets.images import IMAGES
from ao_hf.generation.presets.language import LANGUAGE
from ao_hf.generation.presets.records import Preset

__all__ = ["PRESETS", "find_preset"]

PRESETS: dict[str, Preset] = {**LANGUAGE, **IMAGES}


def find_preset(name: str) -> Preset:
    """The shape of that name.

    Raises:
        UnknownNameError: there is none; with a suggestion.
    """
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]

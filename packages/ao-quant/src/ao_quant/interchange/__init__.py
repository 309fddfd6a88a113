"""Quantized checkpoints of other projects: read, written and converted, with a verdict on each weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.ext import lazy_names

if TYPE_CHECKING:
    from ao_quant.interchange.convert import Conversion, convert_checkpoint
    from ao_quant.interchange.differences import Differences, diff_checkpoints
    from ao_quant.interchange.load import load_foreign
    from ao_quant.interchange.sources import formats
    from ao_quant.interchange.verdicts import Verdict

__all__ = [
    "Conversion",
    "Differences",
    "Verdict",
    "convert_checkpoint",
    "diff_checkpoints",
    "formats",
    "load_foreign",
]

#: records are looked up while plugins are loaded, which must be quick
_MODULES = {
    "Conversion": "ao_quant.interchange.convert",
    "Differences": "ao_quant.interchange.differences",
    "Verdict": "ao_quant.interchange.verdicts",
    "convert_checkpoint": "ao_quant.interchange.convert",
    "diff_checkpoints": "ao_quant.interchange.differences",
    "formats": "ao_quant.interchange.sources",
    "load_foreign": "ao_quant.interchange.load",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)

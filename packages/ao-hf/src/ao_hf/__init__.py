"""Quantized models in transformers, PEFT, diffusers and accelerate.

Importing this package registers ao with each of these libraries: at once where the library is imported
already, else when it is. It imports none of them itself, and fails for none that is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.ext import lazy_names
from ao_hf.__about__ import __version__
from ao_hf.when_imported import when_imported

if TYPE_CHECKING:
    from ao_hf.cache import AoCache, AoEncoderDecoderCache, CachePlan, plan_cache
    from ao_hf.config import AoConfig
    from ao_hf.fusing.apply import fuse, unfuse
    from ao_hf.fusing.report import FuseReport
    from ao_hf.memory import memory_footprint
    from ao_hf.transformers import attach

#: module of a library -> module of ao_hf that is imported after it, and registers ao there
_REGISTRATIONS = {
    "transformers.quantizers.auto": "ao_hf.transformers.registration",
    "transformers.modeling_utils": "ao_hf.cache.registration",
    "diffusers.quantizers.auto": "ao_hf.diffusers.registration",
}
#: public name -> module that defines it
_MODULES = {
    "AoCache": "ao_hf.cache",
    "AoConfig": "ao_hf.config",
    "AoEncoderDecoderCache": "ao_hf.cache",
    "CachePlan": "ao_hf.cache",
    "FuseReport": "ao_hf.fusing.report",
    "attach": "ao_hf.transformers",
    "fuse": "ao_hf.fusing.apply",
    "memory_footprint": "ao_hf.memory",
    "plan_cache": "ao_hf.cache",
    "unfuse": "ao_hf.fusing.apply",
}

__all__ = [
    "AoCache",
    "AoConfig",
    "AoEncoderDecoderCache",
    "CachePlan",
    "FuseReport",
    "__version__",
    "attach",
    "fuse",
    "memory_footprint",
    "plan_cache",
    "unfuse",
]

for _library, _module in _REGISTRATIONS.items():
    when_imported(_library, _module)

__getattr__, __dir__ = lazy_names(__name__, _MODULES)

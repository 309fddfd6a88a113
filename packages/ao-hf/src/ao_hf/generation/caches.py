"""The cache of keys and values that a model generates with: transformers' own, or one in fewer bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_core import QTensor
from ao_core.ext import ConfigError

__all__ = ["cache_bytes", "new_cache"]


def new_cache(model: Any, kv: str | None, tokens: int, compiled: bool = False) -> dict[str, Any]:
    """The arguments of `model.generate` that choose its cache.

    Args:
        model: of transformers.
        kv: name of a recipe for caches; None: transformers' cache in the model's dtype.
        tokens: that the cache must hold.
        compiled: whether its size is fixed and the steps of decoding are compiled.

    Raises:
        ConfigError: no such recipe.
    """
    if kv is not None:
        raise ConfigError(f"kv={kv!r}: quantized caches of models are not built in yet")
    if not compiled:
        return {}
    from transformers import CompileConfig

    # the private field lets it compile for CPUs too
    config = CompileConfig(fullgraph=False, dynamic=None, mode="default", _compile_all_devices=True)
    return {"cache_implementation": "static", "compile_config": config}


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache holds, as they are stored."""
    tensors = [
        value
        for layer in getattr(cache, "layers", ())
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    ]
    return sum(t.stored_bytes if isinstance(t, QTensor) else t.nbytes for t in tensors)

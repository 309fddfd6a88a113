"""What `plan` and `autoquant` share: which formats are compared, and for which parameters."""

from __future__ import annotations

from collections.abc import Sequence

from ao_core import ComputeWeight, Config, FqnToConfig, QTensor, resolve_config
from ao_core.ext import ConfigError, ConfigLike, registry
from ao_core.ext.quantizing import Decision

__all__ = ["kept_anyway", "resolve_candidates"]


def resolve_candidates(
    candidates: Sequence[ConfigLike], *, calibrated: bool = False
) -> list[Config]:
    """The candidates as configurations, each once; with `calibrated`, also those that need data.

    Raises:
        ConfigError: there are none, or one is a choice for several layers.
        UnknownNameError: one of their names is registered nowhere.
    """
    if isinstance(candidates, (str, Config)) or not candidates:
        raise ConfigError(f"candidates={candidates!r}: give a list of configurations or recipes")
    configs = list(dict.fromkeys(resolve_config(candidate) for candidate in candidates))
    for config in configs:
        if isinstance(config, FqnToConfig):
            raise ConfigError("candidates: a FqnToConfig is a choice already; give its formats")
        if not calibrated or registry.algorithm_for(type(config)) is None:
            registry.transform_for(type(config))
        config.check()
    return configs


def kept_anyway(entry: Decision) -> str | None:
    """Why a parameter stays as it is whatever the candidates are; None if it need not."""
    if isinstance(entry.tensor, QTensor):
        return f"it is quantized already ({entry.tensor.spec})"
    if isinstance(entry.tensor, ComputeWeight):
        return "its matmuls are in low precision already"
    return None if entry.config is not None else entry.reason

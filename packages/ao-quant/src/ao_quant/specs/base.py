"""`format_of`: the format that a configuration describes, filled in by the families of formats."""

from __future__ import annotations

from functools import singledispatch

import torch

from ao_core.arguments import checked
from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.spec import Spec
from ao_core.weights import WeightFormat, weight_spec

__all__ = ["format_of", "spec_of"]


@checked
def spec_of(
    config: Config, shape: tuple[int, ...], dtype: torch.dtype, *, conv: bool = False
) -> Spec:
    """The `Spec` of a weight under a configuration; see `ao_core.weights.weight_spec`."""
    return weight_spec(format_of(config), shape, dtype, conv=conv)


@singledispatch
def format_of(config: Config) -> WeightFormat:
    """The format that a configuration describes."""
    raise ConfigError(f"config={config!r} is no configuration of ao-quant")

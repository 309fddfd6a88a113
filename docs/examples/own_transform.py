"""A transform of your own: int4 whose scales are searched for the least squared error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ao_core import (
    Config,
    Recipe,
    Skip,
    Spec,
    Transform,
    config_from_json,
    config_to_json,
    quantize_,
    quantize_tensor,
    register,
)
from ao_core.ext import ConfigError, registry
from ao_core.ext.numerics import choose_qparams, dequantize_affine, quantize_affine


# --8<-- [start:config]
@dataclass(frozen=True)
class Int4SearchedConfig(Config):
    """Symmetric int4 in groups, each scale the best of `steps` fractions of the usual one."""

    group_size: int = 128
    steps: int = 8

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(
                f"group_size={self.group_size!r}: must be positive, e.g. 128"
            )
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps!r}: must be positive, e.g. 8")


# --8<-- [end:config]


# --8<-- [start:apply]
def searched_scale(w, spec, steps):
    """The scale (N, K / g) of each group of w (N, K) with the least squared error of its weights."""
    dtype = registry.dtypes.get(spec.dtype)
    start, _ = choose_qparams(w, dtype, spec.block)
    best, least = start, torch.full_like(start, torch.inf)
    for step in range(steps):
        scale = start * (1.0 - 0.05 * step)
        approx = dequantize_affine(
            quantize_affine(w, dtype, spec.block, scale), dtype, spec.block, scale
        )
        error = (w - approx).square().unflatten(1, (-1, spec.block[1])).sum(-1)
        best, least = (
            torch.where(error < least, scale, best),
            torch.minimum(error, least),
        )
    return best


def apply(weight, config, target):
    """(dense parameter, config, target) -> what replaces it, or Skip with a reason for the report."""
    if weight.dim() != 2:
        return Skip(
            f"searches scales of 2-D weights only, {target.fqn} has {weight.dim()} dimensions"
        )
    if weight.shape[1] % config.group_size:
        return Skip(
            f"group_size={config.group_size} does not divide its {weight.shape[1]} columns"
        )
    spec = Spec("int4", (1, config.group_size), layout="packed")
    return quantize_tensor(
        weight, spec, scale=searched_scale(weight.float(), spec, config.steps)
    )


# --8<-- [end:apply]

# --8<-- [start:use]
register(Transform(Int4SearchedConfig, "int4_searched", version=1, apply=apply))
register(Recipe("int4_searched", Int4SearchedConfig(), "int4 with searched scales"))


def sqnr(config):
    torch.manual_seed(0)
    layer = nn.Linear(256, 256)
    nn.init.normal_(layer.weight, std=0.02)
    return quantize_(layer, config).records[0].sqnr_db


plain, searched = sqnr(Int4SearchedConfig(steps=1)), sqnr("int4_searched")
assert plain + 0.5 < searched < plain + 2
print(f"int4 in groups of 128: {plain:.1f} dB, with searched scales {searched:.1f} dB")

# a configuration is data: JSON, YAML and FqnToConfig work without further code
assert config_from_json(config_to_json(Int4SearchedConfig(32))) == Int4SearchedConfig(
    32
)

# what it cannot do is in the report
print(quantize_(nn.Linear(100, 10), "int4_searched"))
# --8<-- [end:use]

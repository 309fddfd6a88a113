"""Bias correction: the mean error of a layer's outputs, taken off by its bias (Nagel et al. 2019)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ao_core import Algorithm, QTensor, Skip, Solved, Target
from ao_core.ext import ConfigError, bias_name, registry
from ao_core.ext.calibration import SUMS, Statistic, Statistics, matrices, union
from ao_quant.algorithms.applying import nearest
from ao_quant.configs import BiasCorrectionConfig

__all__ = ["needs_bias", "refuses_bias", "solve_bias"]


def needs_bias(config: BiasCorrectionConfig) -> tuple[Statistic, ...]:
    """`Algorithm.needs`: what the algorithm of the base does, and the sums of the inputs."""
    inner = _inner(config)
    return union([(SUMS,), inner.needs(config.base) if inner else ()])


def solve_bias(
    weight: Tensor, seen: tuple[Statistics, ...], config: BiasCorrectionConfig, target: Target
) -> Solved | Skip:
    """`Algorithm.solve`: what the base makes of a weight, and (W - Ŵ) E[x] for the bias."""
    inner = _inner(config)
    found: Solved | Skip
    if inner is None:
        new = nearest(weight, config.base, target)
        found = new if isinstance(new, Skip) else Solved(new, config.base)
    else:
        found = inner.solve(weight, seen, config.base, target)
    if isinstance(found, Skip):
        return found
    if bias_name(target) is None:
        note = "; ".join(filter(None, (found.note, "it has no bias to correct")))
        return replace(found, note=note)
    assert isinstance(found.values, QTensor)
    change = weight.double() - matrices(found.values.dequantize(torch.float32), target).double()
    means = torch.stack([each["sums"] / max(each.rows, 1) for each in seen])
    return replace(found, bias=(change @ means[..., None]).reshape(-1))


def refuses_bias(weight: Tensor, config: BiasCorrectionConfig, target: Target) -> str | None:
    """`Algorithm.refuses`: what the base does."""
    inner = _inner(config)
    if inner is not None:
        return inner.refuses(weight, config.base, target)
    found = registry.transform_for(type(config.base)).apply(weight, config.base, target)
    return found.reason if isinstance(found, Skip) else None


def _inner(config: BiasCorrectionConfig) -> Algorithm | None:
    """The algorithm of the base; None where it needs no data.

    Raises:
        ConfigError: it solves for all weights of a block at once.
    """
    found = registry.algorithm_for(type(config.base))
    if found is None or not found.needs(config.base):
        return None
    if found.solve_block is not None or not found.sequential:
        how = "blocks at once" if found.sequential else "all weights by the model as it is"
        raise ConfigError(
            f"base={config.base!r}: {found.name!r} solves for {how}; bias correction needs one that solves "
            "weight by weight, such as GPTQConfig"
        )
    return found

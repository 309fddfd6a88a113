"""Candidates that need data: what was seen of the inputs of weights, and what algorithms make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ao_core import Config, QTensor, Skip
from ao_core.ext import ConfigError, registry, shown
from ao_core.ext.calibration import (
    HESSIAN,
    Data,
    Inputs,
    batches_of,
    collect,
    inputs_of,
    matrices,
    output_error,
    union,
    unmatrices,
    unobservable,
    unseen_reason,
)
from ao_core.ext.quantizing import Decision, Progress, transformed

__all__ = ["gathered", "layer_error", "solved"]


def gathered(
    model: nn.Module,
    data: Data | None,
    planned: Sequence[Decision],
    configs: Sequence[Config],
    measure: str,
    progress: Progress,
    *,
    predicted: bool = False,
) -> Mapping[str, Inputs]:
    """By the name of a weight, what is needed of its inputs in the model as it is; from one run.

    Args:
        model: it is not changed.
        data: batches.
        planned: the weights.
        configs: the candidates.
        measure: as of `plan`.
        progress: as of `plan`.
        predicted: whether the measure uses the data in another way.

    Raises:
        ConfigError: there is no data and a candidate or the measure needs some, or the other way round.
    """
    algorithms = [(each, registry.algorithm_for(type(each))) for each in configs]
    needs = [found.needs(each) for each, found in algorithms if found is not None]
    if measure == "layer":
        needs.append((HESSIAN,))
    need = union(needs)
    if not need and (data is None or predicted):
        return {}
    if not need:
        raise ConfigError(
            f"data={shown(data)}: no candidate needs calibration data; leave it out, or use "
            "measure='layer', 'output' or 'kl', or candidates such as 'gptq/int4-g128'"
        )
    batches = batches_of(
        data, "measure='layer'" if measure == "layer" else "plan with these candidates"
    )
    seen = [entry for entry in planned if unobservable(entry) is None]
    groups = collect(model, batches, seen, lambda _: need, progress)
    return {
        entry.fqn: inputs_of(entry, group.statistics) for group in groups for entry in group.entries
    }


def solved(entry: Decision, config: Config, inputs: Inputs | None) -> Tensor | Skip:
    """The weight as a configuration quantizes it, by what was seen of its inputs if it is an algorithm's."""
    algorithm, dense = registry.algorithm_for(type(config)), entry.tensor.detach()
    asked = replace(entry, config=config)
    if algorithm is None or not algorithm.needs(config):
        return transformed(asked, dense)
    target = entry.owners[0]
    if inputs is None or not inputs.rows:
        return Skip(unobservable(entry) or unseen_reason(entry))
    if reason := algorithm.refuses(torch.empty_like(dense, device="meta"), config, target):
        return Skip(reason)
    found = algorithm.solve(matrices(dense, target), inputs.statistics, config, target)
    if isinstance(found, Skip):
        return found
    if isinstance(found.values, QTensor):
        return found.values
    if found.values is not None:
        dense = unmatrices(found.values, dense.shape, target).to(dense.dtype)
    return transformed(replace(asked, config=found.config), dense)


def layer_error(entry: Decision, new: Tensor, inputs: Inputs | None) -> float | None:
    """Σ tr(Δ H Δᵀ) over Σ tr(W H Wᵀ): noise over signal of the weight's outputs; None: they were not seen."""
    if inputs is None or not inputs.rows:
        return None
    target, dense = entry.owners[0], entry.tensor.detach().float()
    noise, signal = (
        sum(
            output_error(matrix, each["hessian"].float())
            for matrix, each in zip(matrices(values, target), inputs.statistics, strict=True)
            if each.rows
        )
        for values in (new.dequantize().float() - dense, dense)
    )
    return noise / signal if signal else 0.0

"""Wanda (Sun et al. 2023, arXiv 2306.11695): weights by magnitude times the norm of what they multiply."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ao_core import Config
from ao_core.ext import checked_but
from ao_core.ext.calibration import (
    SQUARES,
    Data,
    Statistics,
    batches_of,
    collect,
    inputs_of,
    matrices,
    unobservable,
    unseen_reason,
)
from ao_core.ext.quantizing import Decision, FilterFn, Progress
from ao_sparsity.prune.choosing import chosen, matrix, pruning_by_score
from ao_sparsity.prune.result import Pruning

__all__ = ["prune_wanda"]


@checked_but("pattern", "data")
def prune_wanda(
    model: nn.Module,
    data: Data,
    pattern: Config,
    filter_fn: FilterFn | None = None,
    *,
    scope: str = "row",
    progress: Progress = None,
) -> Pruning:
    """Masks that keep the weights of the greatest `|W| · ‖x‖₂`, x being the inputs of their column.

    The data is run once, through the model as it is, in evaluation mode. What the data does not reach is
    skipped, and the report says so.

    Args:
        model: any module; it is not changed. Which parameters are pruned is as for `quantize_`.
        data: batches: a tensor, a tuple of arguments or a mapping of them each.
        pattern: a pattern, or a `FqnToConfig` of patterns; the score of a unit is the norm of its weights'.
        filter_fn: (module, its name) -> whether its weights are pruned, in place of the default.
        scope: what a pattern's share is taken of: "row" (the weights of each output, as the paper has
            it), "layer" or "model"; units that are whole rows, columns or heads need one of the latter.
        progress: True for a bar over the batches, or a function called with (done, total, name).

    Raises:
        ConfigError: there is no data, arguments contradict each other, or names match nothing.
        QuantizationError: weights or their inputs have NaN or inf, or weights are quantized already.
    """
    batches = batches_of(data, "Wanda")
    decisions = chosen(model, pattern, filter_fn)
    asked = [entry for entry in decisions if entry.config is not None and not unobservable(entry)]
    groups = collect(model, batches, asked, lambda entry: (SQUARES,), progress)
    seen = {e.fqn: inputs_of(e, group.statistics) for group in groups for e in group.entries}

    def score(entry: Decision) -> Tensor | str:
        if reason := unobservable(entry):
            return reason
        if entry.fqn not in seen or not seen[entry.fqn].rows:
            return unseen_reason(entry)
        weight = matrices(entry.tensor.detach(), entry.owners[0])
        return wanda_scores(weight, seen[entry.fqn].statistics).reshape(matrix(entry).shape)

    return pruning_by_score("wanda", decisions, score, scope, None, seen)


def wanda_scores(weight: Tensor, statistics: Sequence[Statistics]) -> Tensor:
    """`|W| · ‖x‖₂` in float64: E matrices (E, N, K), and `SQUARES` of the inputs of each."""
    norms = torch.stack([each["squares"] for each in statistics]).sqrt()
    return weight.abs().double() * norms.unsqueeze(1)

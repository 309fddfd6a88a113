"""Magnitude pruning: removes the smallest weights."""

from __future__ import annotations

from torch import nn

from ao_core import Config
from ao_core.ext import checked_but
from ao_core.ext.quantizing import FilterFn, Progress
from ao_sparsity.prune.choosing import chosen, matrix, pruning_by_score
from ao_sparsity.prune.result import Pruning

__all__ = ["prune_magnitude"]


@checked_but("pattern")
def prune_magnitude(
    model: nn.Module,
    pattern: Config,
    filter_fn: FilterFn | None = None,
    *,
    scope: str = "layer",
    progress: Progress = None,
) -> Pruning:
    """Masks that keep the weights, or the units of weights, of the greatest magnitude or norm.

    Args:
        model: any module; it is not changed. The same parameters as for `quantize_` are pruned.
        pattern: a pattern, or a `FqnToConfig` of patterns.
        filter_fn: (module, its name) -> whether its weights are pruned, in place of the default.
        scope: what a pattern's share refers to: "layer" (each matrix), "row" (each row of units), or
            "model" (all matrices of the same pattern together).
        progress: True for a bar, or a function called with (done, total, name).

    Raises:
        ConfigError: the arguments contradict each other, or names match nothing.
        QuantizationError: weights with NaN or inf, on the meta device, or quantized already.
    """
    decisions = chosen(model, pattern, filter_fn)
    return pruning_by_score(
        "magnitude", decisions, lambda entry: matrix(entry).abs(), scope, progress
    )

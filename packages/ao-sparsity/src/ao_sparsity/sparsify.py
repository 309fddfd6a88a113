"""`sparsify_`: `quantize_` under its usual name for sparse weights."""

from __future__ import annotations

import torch
from torch import nn

from ao_core import Report, quantize_
from ao_core.ext import ConfigLike, checked
from ao_core.ext.quantizing import FilterFn, Progress

__all__ = ["sparsify_"]


@checked
def sparsify_(
    model: nn.Module,
    config: ConfigLike,
    filter_fn: FilterFn | None = None,
    *,
    device: torch.device | str | None = None,
    strict: bool = False,
    progress: Progress = None,
) -> Report:
    """Store the weights of a model in a sparse layout, in place.

    Values that the layout cannot hold are removed by magnitude. Pruned weights keep their pattern.

    Args:
        model: any module; the weights that `ao_core.quantize_` takes, but no convolutions.
        config: a configuration such as `semi_sparse_weight()`, the name of a recipe, a `FqnToConfig`, or any
            other configuration of `quantize_`.
        filter_fn: (module, its name) -> whether its weights are taken, in place of the default.
        device: move one parameter at a time there, and leave it there.
        strict: raise where a weight that was asked for could not be stored so.
        progress: True for a bar, or a function called with (done, total, name).

    Returns:
        A report with bytes, sparsity and SQNR of each parameter, or the reason why it is unchanged.

    Raises:
        UnknownNameError: no such recipe.
        ConfigError: the configuration cannot work, or one of its names matches nothing.
        QuantizationError: weights with NaN or inf, or on the meta device; nothing was changed then. With
            `strict`, also a weight that was skipped.
    """
    return quantize_(model, config, filter_fn, device=device, strict=strict, progress=progress)

"""SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774): pruned weights are made up for by the others.

The squared error of a layer is a quadratic form in the change of its weights, H = Σ x xᵀ over the inputs.
What follows in the row makes up for a weight that goes, by the formula of the optimal brain surgeon.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ao_core import Config
from ao_core.ext import ConfigError, QuantizationError, checked_but
from ao_core.ext.calibration import (
    HESSIAN,
    Data,
    Inputs,
    Statistics,
    batches_of,
    inverse_factor,
    matrices,
    unmatrices,
    unobservable,
    visit,
)
from ao_core.ext.quantizing import Decision, FilterFn, Progress
from ao_sparsity.masks import greatest_mask, n_of_m_mask
from ao_sparsity.prune.choosing import chosen, pattern_of, pruning, unprunable
from ao_sparsity.prune.patterns import NofM, Pattern, Unstructured
from ao_sparsity.prune.result import Pruning

__all__ = ["prune_sparsegpt", "sparsegpt"]


@checked_but("pattern", "data")
def prune_sparsegpt(
    model: nn.Module,
    data: Data,
    pattern: Config,
    filter_fn: FilterFn | None = None,
    *,
    damping: float = 0.01,
    block: int = 128,
    progress: Progress = None,
) -> Pruning:
    """Masks, and new values of the weights that stay, which make up for those that go.

    Layer by layer, in the order in which the data reaches them: each sees the inputs that the layers pruned
    before it make. Layers with the same inputs share a Hessian, of which there is one at a time. Blocks that
    are called one after the other run by themselves, so the cost is linear in their number; see
    `ao_core.ext.calibration.visit`. What the data does not reach is skipped, and the report says so.

    Args:
        model: any module, on any device; it is as it was afterwards. Which parameters are pruned is as
            for `quantize_`.
        data: batches: a tensor, a tuple of arguments or a mapping of them each.
        pattern: `Unstructured` or `NofM`, or a `FqnToConfig` of those.
        filter_fn: (module, its name) -> whether its weights are pruned, in place of the default.
        damping: share of the mean of H's diagonal that is added to it.
        block: columns whose weights are compared with each other, of all rows; a multiple of `m`.
        progress: True for a bar, or a function called with (done, total, name).

    Raises:
        ConfigError: there is no data, arguments contradict each other, or names match nothing.
        QuantizationError: weights or their inputs have NaN or inf, or weights are quantized already.
    """
    batches = batches_of(data, "SparseGPT")
    decisions = chosen(model, pattern, filter_fn)
    if not damping > 0:
        raise ConfigError(f"damping={damping!r}: need a positive number, such as 0.01")
    reasons: dict[str, str] = {}
    entries: list[Decision] = []
    for entry in decisions:
        if entry.config is None:
            continue
        _check(pattern_of(entry), block)
        if reason := unprunable(entry) or unobservable(entry):
            reasons[entry.fqn] = reason
        else:
            entries.append(entry)
    masks: dict[str, Tensor] = {}
    seen: dict[str, Inputs] = {}
    factors = _Factors(damping)

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor:
        weight = matrices(entry.tensor.detach(), entry.owners[0])
        found = [
            _swept(one, factors.of(each), pattern_of(entry), block)
            for one, each in zip(weight, inputs.statistics, strict=True)
        ]
        new, mask = (torch.stack(each) for each in zip(*found, strict=True))
        shape, owner = entry.tensor.shape, entry.owners[0]
        masks[entry.fqn], seen[entry.fqn] = unmatrices(mask, shape, owner), inputs
        return unmatrices(new, shape, owner)

    done = visit(
        model,
        batches,
        entries,
        lambda entry: (HESSIAN,),
        rewrite,
        progress=progress,
        what="sparsegpt",
    )
    reasons |= done.unseen
    return pruning("sparsegpt", decisions, "layer", masks, reasons, done.values, seen)


class _Factors:
    """The factor of the Hessian that was asked for last: weights with the same inputs share it."""

    def __init__(self, damping: float) -> None:
        self._damping = damping
        self._last: tuple[Statistics, Tensor] | None = None

    def of(self, statistics: Statistics) -> Tensor:
        """As `_inverse_factor` gives it."""
        if self._last is None or self._last[0] is not statistics:
            self._last = statistics, _inverse_factor(statistics["hessian"], self._damping)
        return self._last[1]


def sparsegpt(
    weight: Tensor, hessian: Tensor, pattern: Pattern, damping: float = 0.01, block: int = 128
) -> tuple[Tensor, Tensor]:
    """Prune one matrix: its new values, and the mask of those that stay.

    Args:
        weight: (out, in).
        hessian: (in, in) float64, the sum of x xᵀ, which is damped here.
        pattern: `Unstructured` or `NofM`.
        damping: share of the mean of its diagonal that is added to it.
        block: columns whose weights are compared with each other; a multiple of `m`.

    Raises:
        ConfigError: the pattern is another one, or does not go with `block`.
        QuantizationError: the Hessian cannot be inverted.
    """
    _check(pattern, block)
    return _swept(weight, _inverse_factor(hessian, damping), pattern, block)


def _swept(weight: Tensor, factor: Tensor, pattern: Pattern, block: int) -> tuple[Tensor, Tensor]:
    """The same, given the factor of the damped Hessian's inverse."""
    columns = weight.shape[1]
    new, kept = weight.to(torch.float64, copy=True), torch.ones_like(weight, dtype=torch.bool)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        part, inner = new[:, start:stop], factor[start:stop, start:stop]
        errors = torch.zeros_like(part)
        compared = pattern.m if isinstance(pattern, NofM) else block
        for i in range(stop - start):
            if i % compared == 0:
                scores = (part[:, i : i + compared] / inner.diagonal()[i : i + compared]).square()
                kept[:, start + i : start + i + scores.shape[1]] = _best(scores, start, pattern)
            errors[:, i] = part[:, i].masked_fill(kept[:, start + i], 0) / inner[i, i]
            part[:, i:] -= torch.outer(errors[:, i], inner[i, i:])
        new[:, stop:] -= errors @ factor[start:stop, stop:]
    return new.masked_fill_(~kept, 0).to(weight.dtype), kept


def _check(pattern: Pattern, block: int) -> None:
    if not isinstance(pattern, (Unstructured, NofM)):
        raise ConfigError(
            f"pattern={pattern}: SparseGPT prunes single weights, Unstructured or NofM; use magnitude or "
            "Wanda for larger units"
        )
    m = pattern.m if isinstance(pattern, NofM) else 1
    if block < 1 or block % m:
        raise ConfigError(f"block={block!r}: need a positive multiple of m={m}")


def _best(scores: Tensor, before: int, pattern: Pattern) -> Tensor:
    """What stays of some columns, which `before` others precede."""
    if isinstance(pattern, NofM):
        return n_of_m_mask(scores, pattern.n, pattern.m)
    rows, columns = scores.shape
    # so many that the whole matrix has the nearest whole number
    gone = round(pattern.sparsity * rows * (before + columns)) - round(
        pattern.sparsity * rows * before
    )
    return greatest_mask(scores.flatten(), scores.numel() - gone).view_as(scores)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """`inverse_factor`; raises `QuantizationError` where there is none."""
    factor = inverse_factor(hessian, damping)
    if factor is None:
        raise QuantizationError(
            f"damping={damping!r}: the Hessian has no inverse; use more of it, such as 0.1"
        )
    return factor

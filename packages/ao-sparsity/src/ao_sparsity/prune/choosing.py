"""What all methods share: which parameters are asked for, their matrices, and masks from scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ao_core import Config, FqnToConfig
from ao_core.ext import (
    ConfigError,
    QuantizationError,
    check_quantizable,
    is_conv,
    is_converted,
    is_transposed,
    shown,
)
from ao_core.ext.calibration import Inputs
from ao_core.ext.kernels import is_sharded
from ao_core.ext.quantizing import Decision, FilterFn, Progress, decide, watched
from ao_sparsity.prune.patterns import SCOPES, Pattern
from ao_sparsity.prune.result import PruneRecord, PruneReport, Pruning

__all__ = [
    "chosen",
    "matrix",
    "pattern_of",
    "pruning",
    "pruning_by_score",
    "unmatrix",
    "unprunable",
]


def chosen(model: nn.Module, pattern: Config, filter_fn: FilterFn | None) -> list[Decision]:
    """What to do with each parameter of the model, all checked; changes nothing.

    Raises:
        ConfigError: `pattern` is not a pattern and no `FqnToConfig` of some, or names what is not there.
        QuantizationError: a weight has NaN or inf, is on the meta device, or quantized.
    """
    entries = pattern.entries if isinstance(pattern, FqnToConfig) else (("*", pattern),)
    for key, each in entries:
        if not isinstance(each, Pattern) and (each is not None or each is pattern):
            where = f"[{key!r}]" if isinstance(pattern, FqnToConfig) else ""
            raise ConfigError(f"pattern{where}={shown(each)}: need a pattern, such as NofM(2, 4)")
    decisions = decide(model, pattern, filter_fn)
    for entry in decisions:
        if entry.config is None:
            continue
        if is_converted(entry.tensor):
            kind = type(entry.tensor).__name__
            raise QuantizationError(
                f"{entry.fqn} is a {kind}; prune the dense model first, or leave it out"
            )
        check_quantizable(_whole(entry.tensor), entry.fqn)
    return decisions


def pattern_of(entry: Decision) -> Pattern:
    """The pattern of a parameter that is to be pruned."""
    return cast("Pattern", entry.config)


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all ranks where it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def matrix(entry: Decision, values: Tensor | None = None) -> Tensor:
    """The weight, or values of its shape, as (..., out, in); the filters of a convolution as one row each."""
    tensor = _whole(entry.tensor.detach() if values is None else values)
    if is_transposed(entry.owners[0]):
        return tensor.t()
    return tensor.flatten(1) if is_conv(tensor, entry.owners[0]) else tensor


def unmatrix(values: Tensor, entry: Decision) -> Tensor:
    """Inverse of `matrix`."""
    if is_transposed(entry.owners[0]):
        values = values.t()
    return values.reshape(entry.tensor.shape).contiguous()


def unprunable(entry: Decision) -> str | None:
    """Why a parameter cannot have its pattern; None where it can."""
    if entry.tensor.numel() == 0:
        return "it has no elements"
    shape = matrix(entry, torch.empty(entry.tensor.shape, device="meta")).shape
    return pattern_of(entry).refuses(tuple(shape))


def pruning_by_score(
    method: str,
    decisions: Sequence[Decision],
    score: Callable[[Decision], Tensor | str],
    scope: str,
    progress: Progress,
    inputs: Mapping[str, Inputs] | None = None,
) -> Pruning:
    """Masks that keep what has the greatest scores.

    Args:
        method: for the report.
        decisions: what `chosen` gave.
        score: of each element of a parameter's matrix, or why there is none.
        scope: one of `SCOPES`; with "model", parameters of the same pattern share its budget.
        progress: as for `quantize_`.
        inputs: by name, what was seen of the inputs of parameters, for the report.
    """
    if scope not in SCOPES:
        raise ConfigError(f"scope={scope!r}: use one of {', '.join(map(repr, SCOPES))}")
    masks: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    groups = _groups([entry for entry in decisions if entry.config is not None], scope)
    for group in watched(groups, [group[0].fqn for group in groups], progress, "prune"):
        found = [(entry, unprunable(entry) or score(entry)) for entry in group]
        reasons |= {entry.fqn: each for entry, each in found if isinstance(each, str)}
        scored = [(entry, each) for entry, each in found if isinstance(each, Tensor)]
        if scored:
            kept = pattern_of(group[0]).masks([each for _, each in scored], scope)
            for (entry, _), mask in zip(scored, kept, strict=True):
                masks[entry.fqn] = unmatrix(mask, entry)
    return pruning(method, decisions, scope, masks, reasons, inputs=inputs)


def _groups(entries: Sequence[Decision], scope: str) -> list[list[Decision]]:
    """Parameters whose masks are chosen together."""
    if scope != "model":
        return [[entry] for entry in entries]
    groups: dict[Any, list[Decision]] = {}
    for entry in entries:
        groups.setdefault(entry.config, []).append(entry)
    return list(groups.values())


def pruning(
    method: str,
    decisions: Sequence[Decision],
    scope: str,
    masks: dict[str, Tensor],
    reasons: dict[str, str],
    weights: dict[str, Tensor] | None = None,
    inputs: Mapping[str, Inputs] | None = None,
) -> Pruning:
    """Masks with their report; `reasons`: why parameters that were asked for have none."""
    records = []
    inputs = inputs or {}
    for entry in decisions:
        common: dict[str, Any] = {
            "fqn": entry.fqn,
            "shape": tuple(entry.tensor.shape),
            "tied": tuple(owner.fqn for owner in entry.owners[1:]),
        }
        mask = masks.get(entry.fqn)
        if entry.config is None:
            records.append(PruneRecord(status="unchanged", reason=entry.reason, **common))
        elif mask is None:
            records.append(PruneRecord(status="skipped", reason=reasons[entry.fqn], **common))
        else:
            removed = mask.numel() - int(mask.count_nonzero())
            seen = inputs.get(entry.fqn)
            records.append(
                PruneRecord(
                    status="pruned",
                    reason="",
                    pattern=str(entry.config),
                    weights=mask.numel(),
                    removed=removed,
                    rows=None if seen is None else seen.rows,
                    note="" if seen is None else seen.note,
                    **common,
                )
            )
    return Pruning(masks, PruneReport(method, scope, tuple(records)), weights or {})

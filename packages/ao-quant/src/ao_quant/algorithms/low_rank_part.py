"""A part of low rank that is taken out of weights before they are quantized, as transform of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import Config, Prepared, QTensor
from ao_core.ext import ChosenSteps, ConfigError, is_transposed, low_rank_step
from ao_core.ext.calibration import (
    Sample,
    Statistics,
    best_of_rank,
    collect,
    operand,
    sampled_rows,
    unobservable,
    unseen_reason,
)
from ao_core.ext.quantizing import Decision
from ao_quant.algorithms.applying import nearest
from ao_quant.algorithms.channels import format_of, no_step
from ao_quant.configs import LowRankConfig

__all__ = ["after_low_rank", "nearest_of_rank", "take_out"]

#: rows on which it is judged whether the part helps
_ROWS = sampled_rows(256)
#: the least side of a matrix whose first directions are found by iteration
_LARGE = 1024
#: directions beside those that are wanted, and rounds of iteration at most
_MORE, _ROUNDS = 8, 12
#: iteration ends when no more of the matrix is found than this share of what is there
_DONE = 1e-4
_TINY = 1e-30


def after_low_rank(config: Config, before: Sequence[Config]) -> str | None:
    """`ModelTransform.refuses` of all that change weights."""
    if any(isinstance(other, LowRankConfig) for other in before):
        return (
            "the part of low rank was taken out of the weights as they were, and would not fit them; put "
            f"{type(config).__name__} before LowRankConfig"
        )
    return None


def take_out(
    model: nn.Module, weights: Sequence[Decision], batches: Sequence[Sample], config: LowRankConfig
) -> Prepared:
    """`ModelTransform.apply` of `LowRankConfig`.

    Raises:
        ConfigError: there are no weights of linear layers, or nothing quantizes them afterwards.
    """
    if weights and all(entry.config is None for entry in weights):
        raise ConfigError(
            "base=None: LowRankConfig leaves the rest of each weight to what quantizes it, and nothing does "
            "afterwards; use a list, [LowRankConfig(), GPTQConfig(...)], or LowRankConfig(base)"
        )
    notes: dict[str, str] = {}
    fit: list[Decision] = []
    for entry in weights:
        if reason := _unfit(entry, config.rank):
            notes[entry.fqn] = f"no part of low rank: {reason}"
        else:
            fit.append(entry)
    if not fit:
        raise ConfigError(
            "LowRankConfig: there are no weights of linear layers that are going to be quantized"
        )
    seen: dict[str, tuple[Statistics, ...]] = {}
    for group in collect(model, batches, fit, lambda _: (_ROWS,)):
        seen |= dict.fromkeys((entry.fqn for entry in group.entries), group.statistics)
    steps: dict[str, ChosenSteps] = {}
    for entry in fit:
        if entry.fqn not in seen:
            notes[entry.fqn] = f"no part of low rank: {unseen_reason(entry)}"
            continue
        values = operand(entry.tensor.detach(), entry.owners[0])
        if entry.steps is not None:
            values = entry.steps.weight(values)
        part, share = _part(values, config.rank)
        text = f"rank {config.rank} taken out, {share:.1%} of its squares"
        errors = _errors(entry, values, part, seen[entry.fqn])
        if errors is not None:
            ratio = errors[1] / max(errors[0], _TINY)
            if ratio >= 1:
                notes[entry.fqn] = (
                    f"no part of low rank: with rank {config.rank} its outputs have {ratio:.2f} of the error "
                    "without"
                )
                continue
            text += f", {ratio:.2f} of the error of rounding"
        steps[entry.fqn], notes[entry.fqn] = part, text
    return Prepared(model, steps, notes)


def _unfit(entry: Decision, rank: int) -> str | None:
    if reason := unobservable(entry) or no_step(entry):
        return reason
    sides = operand(entry.tensor, entry.owners[0]).shape[-2:]
    return f"rank {rank} is all of a matrix of {tuple(sides)}" if rank >= min(sides) else None


def _part(values: Tensor, rank: int) -> tuple[ChosenSteps, float]:
    """The step for a weight (N, K) or (E, N, K), and the share of its squares that is taken out."""
    found = [nearest_of_rank(matrix, rank) for matrix in values.reshape(-1, *values.shape[-2:])]
    b, a = (torch.stack(parts) for parts in zip(*found, strict=True))
    taken = float((b.double() @ a.double()).square().sum())
    share = taken / max(float(values.double().square().sum()), _TINY)
    pair = (b, a) if values.dim() == 3 else (b[0], a[0])
    return ChosenSteps((low_rank_step(rank),), low_rank=pair), share


def nearest_of_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B (N, rank) and A (rank, K), float32, whose matmul is nearest to a matrix (N, K).

    By the eigenvectors of its Gram matrix; of large ones by iteration on a subspace that begins with random
    numbers of a seed, until it holds no more of the matrix.
    """
    if min(matrix.shape) <= _LARGE:
        return best_of_rank(matrix, rank)
    wide = matrix.float()
    generator = torch.Generator().manual_seed(rank)
    start = torch.randn(wide.shape[1], rank + _MORE, generator=generator).to(wide.device)
    basis, held = torch.linalg.qr(wide @ start)[0], 0.0
    for _ in range(_ROUNDS):
        rows = basis.t() @ wide
        now = float(rows.square().sum())
        if now - held <= _DONE * now:
            break
        held, basis = now, torch.linalg.qr(wide @ rows.t())[0]
    b, a = best_of_rank(basis.t() @ wide, rank)
    return basis @ b, a


def _errors(
    entry: Decision, values: Tensor, part: ChosenSteps, seen: tuple[Statistics, ...]
) -> tuple[float, float] | None:
    """Squared errors of a layer's outputs over their squared size, without and with the part.

    Activations are quantized as they are going to be. Each row counts alike, as for SmoothQuant. None where
    it is not known.
    """
    fmt, target = format_of(entry.config), entry.owners[0]
    if fmt is None or values.dim() != 2 or not seen[0].rows:
        return None
    x = seen[0]["sample"].to(values.dtype)
    expected = x.double() @ values.double().t()
    sizes = expected.square().sum(-1).clamp(min=_TINY)
    errors = []
    for stored in (values, part.weight(values)):
        found = nearest(stored[None], fmt, target)
        if not isinstance(found, QTensor):
            return None
        q = found.t() if is_transposed(target) else found
        assert isinstance(q, QTensor)
        made = F.linear(x, q if stored is values else part.attached(q))
        errors.append(float(((made.double() - expected).square().sum(-1) / sizes).sum()))
    return errors[0], errors[1]

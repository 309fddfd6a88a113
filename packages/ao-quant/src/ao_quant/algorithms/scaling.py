"""AWQ, SmoothQuant and cross-layer equalization: factors of channels, as transforms of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ao_core import Prepared, QTensor
from ao_core.ext import ConfigError, is_conv, is_transposed
from ao_core.ext.calibration import (
    ABS_MAX,
    ABS_SUMS,
    HESSIAN,
    Sample,
    matrices,
    output_error,
    sampled_rows,
)
from ao_core.ext.graph import ScaledDimension, ScaleGroup, scaled, tensors_of
from ao_core.ext.quantizing import Decision
from ao_quant.algorithms.applying import nearest
from ao_quant.algorithms.channels import (
    Channels,
    Found,
    Reader,
    fold,
    graph_of,
    over_channels,
    proven_all,
    spread,
)
from ao_quant.configs import AWQConfig, EqualizeConfig, SmoothQuantConfig
from ao_quant.configs.scaling import SEARCH

__all__ = ["awq_factors", "equalize", "equalizing_scales", "scale_by_awq", "smooth"]

#: the least factor of a channel, and the least range of one
_LEAST, _TINY = 1e-4, 1e-5
#: rows on which an exponent of SmoothQuant is judged
_ROWS = sampled_rows(256)
#: the exponent of SmoothQuant where none is searched for
_USUAL = 0.5
#: rounds of equalization end when no channel changes by more than this
_DONE = 1e-3


def scale_by_awq(
    model: nn.Module, weights: Sequence[Decision], batches: Sequence[Sample], config: AWQConfig
) -> Prepared:
    """`ModelTransform.apply` of `AWQConfig`.

    Raises:
        ConfigError: nothing quantizes the weights afterwards.
    """
    if weights and all(entry.config is None for entry in weights):
        raise ConfigError(
            "base=None: AWQConfig rounds to it, and nothing quantizes the weights afterwards; use a list, "
            "[AWQConfig(), GPTQConfig(...)], or AWQConfig(base)"
        )
    notes: dict[str, str] = {}

    def find(each: Channels) -> Found | None:
        factors, ratio, error = awq_factors(each, config.steps)
        if ratio:
            text = f"r = {ratio:g}, {error:.3f} of the error of rounding"
            return each.without_statistics(), factors, text
        names = (reader.entry.fqn for reader in each.readers)
        notes.update(dict.fromkeys(names, "AWQ: r = 0, no factors are better"))
        return None

    found = over_channels(model, weights, batches, (HESSIAN, ABS_SUMS), notes, find)
    made = fold(model, batches[0], found, "AWQ")
    return Prepared(made.model, made.steps, notes | made.notes)


def awq_factors(channels: Channels, steps: int) -> tuple[Tensor, float, float]:
    """Factors of channels, the exponent that makes them, and their error over that of no factors."""
    sizes = torch.stack(
        [
            spread(
                torch.stack([each["abs_sums"] / max(each.rows, 1) for each in reader.statistics]),
                reader,
                channels.size,
                "mean",
            )
            for reader in channels.readers
        ]
    ).mean(0)
    best = torch.ones_like(sizes)
    # errors are only compared, with several digits between them: a third of the time of float64
    hessians = [[each["hessian"].float() for each in r.statistics] for r in channels.readers]

    def error_of(factors: Tensor) -> float:
        pairs = zip(channels.readers, hessians, strict=True)
        return sum(_rounding_error(reader, factors, each) for reader, each in pairs)

    first = least = error_of(best)
    ratio = 0.0
    for step in range(1, steps + 1):
        factors = sizes.clamp(min=_LEAST) ** (step / steps)
        factors /= (factors.max() * factors.min()).sqrt()
        if (error := error_of(factors)) < least:
            best, least, ratio = factors, error, step / steps
    return best, ratio, least / first if first else 1.0


def _rounding_error(reader: Reader, factors: Tensor, hessians: Sequence[Tensor]) -> float:
    """tr(Δ H Δᵀ) of a weight whose columns are rounded after they were multiplied by factors."""
    if reader.format is None:
        return 0.0
    columns, weight = reader.columns(factors)[:, None], reader.weight
    target = reader.entry.owners[0]
    found = nearest((weight * columns).to(weight.dtype), reader.format, target)
    if not isinstance(found, QTensor):
        return 0.0
    values = matrices(found.dequantize(torch.float32), target)
    change = (values / columns - weight).float()
    return sum(
        output_error(delta, hessian)
        for delta, hessian, each in zip(change, hessians, reader.statistics, strict=True)
        if each.rows
    )


def smooth(
    model: nn.Module,
    weights: Sequence[Decision],
    batches: Sequence[Sample],
    config: SmoothQuantConfig,
) -> Prepared:
    """`ModelTransform.apply` of `SmoothQuantConfig`."""
    need = (ABS_MAX, _ROWS) if config.alpha == SEARCH else (ABS_MAX,)
    notes: dict[str, str] = {}

    def find(each: Channels) -> Found:
        inputs, columns = _ranges(each)
        alphas = [_USUAL if config.alpha == SEARCH else float(config.alpha)]
        candidates: dict[str, Tensor] = {}
        if config.alpha == SEARCH and _is_searchable(model, each):
            alphas = [step / 10 for step in range(11)]
            candidates["no factors"] = torch.ones_like(inputs)
        for alpha in alphas:
            candidates[f"alpha = {alpha:g}"] = inputs**alpha / columns ** (1 - alpha)
        text = next(iter(candidates))
        if len(candidates) > 1:
            errors = {
                text: sum(_layer_error(reader, factors) for reader in each.readers)
                for text, factors in candidates.items()
            }
            text = min(errors, key=lambda name: errors[name])
        return each.without_statistics(), candidates[text], text

    found = over_channels(model, weights, batches, need, notes, find)
    made = fold(model, batches[0], found, "SmoothQuant")
    return Prepared(made.model, made.steps, notes | made.notes)


def _is_searchable(model: nn.Module, channels: Channels) -> bool:
    """Whether norms make the channels, and errors of all readers can be measured."""
    if channels.group is None or not all(map(_is_measurable, channels.readers)):
        return False
    tensors = tensors_of(model)
    return all(tensors[site.parameter].dim() == 1 for site in channels.group.producers)


def _is_measurable(reader: Reader) -> bool:
    """Whether it is known what a weight is quantized to, and it is the matrix of a linear layer."""
    is_matrix = not is_conv(reader.entry.tensor, reader.entry.owners[0]) and len(reader.weight) == 1
    return reader.format is not None and is_matrix


def _ranges(channels: Channels) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each channel, of activations and in the weights that read it."""
    inputs, columns = (
        torch.stack(
            [spread(of(reader), reader, channels.size, "amax") for reader in channels.readers]
        )
        .amax(0)
        .clamp(min=_TINY)
        for of in (
            lambda reader: torch.stack([each["abs_max"].float() for each in reader.statistics]),
            lambda reader: reader.weight.abs().amax(1).float(),
        )
    )
    return inputs, columns


def _layer_error(reader: Reader, factors: Tensor) -> float:
    """Σ over sampled rows of the squared error of the outputs, over their squared size.

    Activations are quantized as they are going to be. Each row counts alike: those of a few tokens are a
    thousand times as large as others in many models, and would decide alone.
    """
    target, weight = reader.entry.owners[0], reader.weight
    assert reader.format is not None
    columns = reader.columns(factors)[:, None]
    found = nearest((weight * columns).to(weight.dtype), reader.format, target)
    if not isinstance(found, QTensor):
        return 0.0
    x = reader.statistics[0]["sample"].to(weight.dtype)
    made = F.linear(x / columns[0].to(x.dtype), found.t() if is_transposed(target) else found)
    expected = x.double() @ weight[0].double().t()
    errors = (made.double() - expected).square().sum(-1)
    return float((errors / expected.square().sum(-1).clamp(min=_TINY**2)).sum())


def equalize(
    model: nn.Module,
    weights: Sequence[Decision],
    batches: Sequence[Sample],
    config: EqualizeConfig,
) -> Prepared:
    """`ModelTransform.apply` of `EqualizeConfig`.

    Raises:
        ConfigError: there are no weights between which scales pass.
    """
    graph, reason = graph_of(model, batches)
    groups = [g for g in graph.scale_groups if _is_pair(model, g)] if graph else []
    if not groups:
        raise ConfigError(
            "EqualizeConfig: there are no two weights between which scales pass: "
            + (reason or "; ".join(graph.notes if graph else ()) or "no operation passes them")
        )
    scales = equalizing_scales(tensors_of(model), groups, config.rounds)
    changes = {
        group.name: (lambda tensors, group=group, by=by: scaled(tensors, group, by))
        for group, by in zip(groups, scales, strict=True)
    }
    new, wrong = proven_all(model, batches[0], changes, "cross-layer equalization")
    notes: dict[str, list[str]] = {}
    for group in groups:
        names = ", ".join(site.parameter for site in group.consumers)
        text = f"equalized with {names}"
        if group.name in wrong:
            text = f"not {text}: {wrong[group.name]}"
        notes.setdefault(group.name, []).append(text)
    return Prepared(new, {}, {name: "; ".join(texts) for name, texts in notes.items()})


def _is_pair(model: nn.Module, group: ScaleGroup) -> bool:
    """Whether a matrix makes its channels, and one reads them."""
    tensors = tensors_of(model)
    return all(
        any(tensors[site.parameter].dim() > 1 for site in sites)
        for sites in (group.producers, group.consumers)
    )


def equalizing_scales(
    tensors: Mapping[str, Tensor], groups: Sequence[ScaleGroup], rounds: int
) -> list[Tensor]:
    """One scale per channel of each group, by which both sides of all groups have the same ranges."""
    now = {name: tensor.detach().double() for name, tensor in tensors.items()}
    total = [torch.ones(group.size, dtype=torch.float64) for group in groups]
    for _ in range(rounds):
        most = 0.0
        for place, group in enumerate(groups):
            made, read = (_range(now, group, sites) for sites in (group.producers, group.consumers))
            scales = torch.where((made > 0) & (read > 0), (made / read).sqrt(), 1.0)
            now |= scaled(now, group, scales)
            total[place] *= scales.to(total[place].device)
            most = max(most, float((scales - 1).abs().max()))
        if most < _DONE:
            break
    return total


def _range(
    tensors: Mapping[str, Tensor], group: ScaleGroup, sites: Sequence[ScaledDimension]
) -> Tensor:
    """The largest magnitude of each channel in the matrices of one side."""
    found = torch.zeros(group.size, dtype=torch.float64)
    for site in sites:
        tensor = tensors[site.parameter]
        if tensor.dim() > 1:
            sizes = tensor.abs().movedim(site.dim, 0).flatten(1).amax(1).cpu()
            there = site.channels >= 0
            found.scatter_reduce_(0, site.channels[there], sizes[there], "amax")
    return found

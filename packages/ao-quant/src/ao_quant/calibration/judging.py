"""What one scale for all activations costs the products of a weight, next to scales of each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Config, Spec, Target
from ao_core.ext import WeightConfig, quantize_values
from ao_core.ext.calibration import Statistics
from ao_core.ext.quantizing import warn_caller
from ao_quant.calibration.stated import found_scales, is_of_experts
from ao_quant.configs import StaticConfig

__all__ = [
    "OutlierWarning",
    "ProductErrors",
    "product_errors",
    "settled",
    "warn_of_outliers",
]


#: rows of the weight, evenly spread, whose products are compared: errors of more differ little
_OUTPUTS = 2048
#: what `ROWS` keeps
_KINDS = ("sample", "greatest")
_DONE = {
    "dynamic": "each call computes their scales instead",
    "dense": "they stay dense",
    "keep": "they have one scale nevertheless, which can ruin a model",
}


class OutlierWarning(UserWarning):
    """Activations have outliers, for which one scale for all tokens is no good."""


class ProductErrors(NamedTuple):
    """Mean over tokens of the squared error of a product over its squared size."""

    static: float
    dynamic: float

    def are_apart(self, most: float) -> bool:
        """Whether the error of the static product is more than `most` times that of the dynamic one.

        Errors of layers are nearly independent, so their energies add up in the answer, with any weights. If
        no layer's is more than so many times as large, neither is the answer's.
        """
        return not self.static <= most * self.dynamic

    def __str__(self) -> str:
        return f"{self.static:.2g} with one scale, {self.dynamic:.2g} with scales of each call"


def product_errors(
    weight: Tensor, rows: Sequence[Mapping[str, Tensor]], config: StaticConfig, target: Target
) -> ProductErrors:
    """The errors of the products of a weight (E, N, K) with some of its activations.

    Both the weight and the activations are rounded, and products are compared with dense ones, in float32.
    Each token counts alike: in many models a few tokens are a thousand times as large as all others. The
    tokens of an expert are its own, and those of a convolution are positions, of all groups of channels.

    Args:
        weight: dense; see `matrices`.
        rows: the states of `ROWS` of each matrix.
        config: with its scale, or scales.
        target: the parameter.

    Returns:
        Those of the sample, or of the greatest rows where these are further apart; of experts, those that are
        furthest apart.
    """
    some = weight[:, :: max(1, weight.shape[1] // _OUTPUTS)].float()
    x = [{key: each[key].to(weight.device, torch.float32) for key in _KINDS} for each in rows]
    if not is_of_experts(target):
        return _apart(some, x, config)
    experts = enumerate(zip(some.unbind(), x, strict=True))
    return max((_apart(w[None], [own], config.of_matrix(i)) for i, (w, own) in experts), key=_ratio)


def _apart(
    weight: Tensor, x: Sequence[Mapping[str, Tensor]], config: StaticConfig
) -> ProductErrors:
    """The errors where all matrices have one scale: groups of channels, or only one.

    Rows of the groups of a convolution stand for one position, also where they are of several ones.
    """
    kinds = [[each[key] for each in x] for key in _KINDS]
    # each group may have another number of distinct rows
    parts = [torch.stack([rows[: min(map(len, kind))] for rows in kind]) for kind in kinds]
    counts, rows = [part.shape[1] for part in parts], torch.cat(parts, 1)
    expected = rows @ weight.transpose(1, 2)
    sizes = expected.square().sum((0, 2))

    def errors(fmt: WeightConfig) -> list[float]:
        wrong = (_product(rows, weight, fmt) - expected).square().sum((0, 2))
        found = torch.where(sizes > 0, wrong / sizes, 0.0).double()
        return [float(part.mean()) for part in found.split(counts)]

    return max(map(ProductErrors, errors(config), errors(config.dynamic())), key=_ratio)


def _product(rows: Tensor, weight: Tensor, config: WeightConfig) -> Tensor:
    """Products (G, T, N) of rows (G, T, K) with a weight (G, N, K), both rounded as `config` says."""
    (groups, count, width), fmt = rows.shape, config.weight_format(torch.float32)
    given = {"act_scale": fmt.act_scale, "act_zero_point": fmt.act_zero_point}
    if groups == 1:
        return F.linear(rows[0], _quantized(weight[0], fmt.spec, fmt.scale_method, given))[None]
    # the convolution of one position
    filters = weight.reshape(-1, width, 1)
    spec = config.spec(tuple(filters.shape), torch.float32, conv=True)
    seen = rows.transpose(0, 1).reshape(count, groups * width, 1)
    out = F.conv1d(seen, _quantized(filters, spec, fmt.scale_method, given), groups=groups)
    return out.reshape(count, groups, -1).transpose(0, 1)


def _quantized(weight: Tensor, spec: Spec, scale_method: str, given: Mapping[str, Any]) -> Tensor:
    return quantize_values(weight, spec, scale_method=scale_method, **given)


def _ratio(errors: ProductErrors) -> float:
    return errors.static / errors.dynamic if errors.dynamic else 0.0


def settled(
    weight: Tensor, statistics: Sequence[Statistics], config: StaticConfig, target: Target
) -> tuple[Config | None, str]:
    """What a weight gets by `on_outliers`, and the reason where its products have outliers; else "".

    Args:
        weight: dense, (E, N, K); see `matrices`.
        statistics: of the inputs of each matrix, those of `observed` and `ROWS`.
        config: without a scale.
        target: the parameter.
    """
    scaled = found_scales(config, statistics, of_experts=is_of_experts(target))
    with torch.no_grad():
        errors = product_errors(weight, [each.values for each in statistics], scaled, target)
    if not errors.are_apart(config.max_error_ratio):
        return scaled, ""
    is_linear = getattr(target.module, target.name).dim() == 2
    dynamic = config.dynamic("linear" if is_linear else "all")
    instead: dict[str, Config | None] = {"dynamic": dynamic, "dense": None, "keep": scaled}
    whose = "the inputs of an expert" if is_of_experts(target) else "its inputs"
    reason = (
        f"{whose} have outliers: error of the product {errors} (on_outliers={config.on_outliers!r})"
    )
    return instead[config.on_outliers], reason


def warn_of_outliers(found: Mapping[str, Config | None]) -> None:
    """Name weights with outliers, each with what it gets."""
    policies = {name: _policy(config) for name, config in found.items()}
    for policy, done in _DONE.items():
        names = [name for name, its in policies.items() if its == policy]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            warn_caller(
                f"the inputs of {', '.join(names[:3])}{more} have outliers, which make products with one "
                f"scale for all tokens much less accurate than with scales of each call: {done} "
                f"(on_outliers={policy!r}; the report has the figures)",
                OutlierWarning,
            )


def _policy(config: Config | None) -> str:
    if config is None:
        return "dense"
    return "keep" if isinstance(config, StaticConfig) else "dynamic"

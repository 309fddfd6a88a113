"""What one scale for all activations costs the products of a weight, next to scales of each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import Config, Skip, Target
from ao_core.ext import WeightConfig, is_transposed
from ao_core.ext.calibration import State, Statistic, sampled_rows
from ao_core.ext.quantizing import warn_caller
from ao_quant.algorithms.applying import nearest
from ao_quant.configs import StaticConfig

__all__ = [
    "ROWS",
    "OutlierWarning",
    "ProductErrors",
    "product_errors",
    "settled",
    "warn_of_outliers",
]


def _greatest(rows: Tensor, before: int) -> State:
    reach = rows.abs().amax(-1)
    place = reach.argmax()
    return {"greatest": rows[place : place + 1].clone(), "reach": reach[place].float().reshape(1)}


#: "greatest": the row (1, in) of the largest magnitude, which is "reach", (1,): a sample may miss the token
#: that an observer clips
_GREATEST = Statistic(
    "greatest_row",
    ("greatest", "reach"),
    _greatest,
    lambda a, b: b if bool(b["reach"] > a["reach"]) else a,
)
#: what is kept of the activations of each weight, to compute products with
ROWS = (sampled_rows(64), _GREATEST)
#: rows of the weight, evenly spread, whose products are compared: errors of more differ little
_OUTPUTS = 2048
#: The most that the error of a static product may be, as a multiple of that of the dynamic one. Errors of
#: layers are nearly independent, so that their energies add up in the answer, whatever each layer counts
#: there: if no layer's is more than so many times as large, neither is the answer's, and most are less. Twice
#: the energy is half a bit of precision, four times a whole one; this is between the two.
_MOST = 3.0
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

    @property
    def are_apart(self) -> bool:
        """Whether the static product is much worse."""
        return not self.static <= _MOST * self.dynamic

    def __str__(self) -> str:
        return f"{self.static:.2g} with one scale, {self.dynamic:.2g} with scales of each call"


def product_errors(
    weight: Tensor, rows: Mapping[str, Tensor], config: StaticConfig, target: Target
) -> ProductErrors | None:
    """The errors of the products of a weight (1, N, K) with some of its activations.

    Both the weight and the activations are rounded, and products are compared with dense ones, in float32.
    Each token counts alike: in many models a few tokens are a thousand times as large as all others.

    Args:
        weight: dense.
        rows: the states of `ROWS`.
        config: with its scale.
        target: the parameter.

    Returns:
        Those of the sample, or of the sample and the greatest row where these are further apart. None where a
        format does not take the weight.
    """
    some = weight[:, :: max(1, weight.shape[1] // _OUTPUTS)].float()
    x = torch.cat([rows["sample"], rows["greatest"]]).to(some.device, torch.float32)
    expected = x @ some[0].t()
    sizes = expected.square().sum(-1)

    def errors(fmt: WeightConfig) -> Tensor | None:
        found = nearest(some, fmt, target)
        if isinstance(found, Skip):
            return None
        made = F.linear(x, found.t() if is_transposed(target) else found)
        wrong = (made - expected).square().sum(-1)
        return torch.where(sizes > 0, wrong / sizes, 0.0).double()

    static, dynamic = errors(config), errors(config.dynamic())
    if static is None or dynamic is None:
        return None
    found = [
        ProductErrors(*(float(each[:count].mean()) for each in (static, dynamic)))
        for count in (len(x) - 1, len(x))
    ]
    return max(found, key=lambda each: each.static / each.dynamic if each.dynamic else 0.0)


def settled(
    weight: Tensor, rows: Mapping[str, Tensor], config: StaticConfig, target: Target
) -> tuple[Config | None, str]:
    """What a weight gets by `on_outliers`, and the reason where its products have outliers; else "".

    Args: as for `product_errors`.
    """
    with torch.no_grad():
        errors = product_errors(weight, rows, config, target)
    if errors is None or not errors.are_apart:
        return config, ""
    instead: dict[str, Config | None] = {"dynamic": config.dynamic(), "dense": None, "keep": config}
    reason = f"its inputs have outliers: error of the product {errors} (on_outliers={config.on_outliers!r})"
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

"""A plan as a matplotlib figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.ext import MissingExtraError
from ao_quant.planning.text import ERRORS, config_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ao_quant.planning.result import QuantizationPlan

__all__ = ["plan_figure"]


def plan_figure(plan: QuantizationPlan) -> Figure:
    """Error over bytes: the best plans, each format everywhere it can be, and this plan."""
    try:
        # not pyplot: it would choose a backend and keep the figure alive
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingExtraError(
            "matplotlib", "ao-quant[plan]", "QuantizationPlan.plot()"
        ) from missing
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    curve = [(size / 1e6, error) for size, error in plan.curve if error > 0]
    axes.plot([x for x, _ in curve], [y for _, y in curve], "-", color="gray", label="best plans")
    for name, (size, error) in _everywhere(plan).items():
        if error > 0:
            axes.plot(size / 1e6, error, "o", fillstyle="none", label=f"{name} everywhere")
    if plan.error > 0:
        axes.plot(plan.bytes / 1e6, plan.error, "k*", markersize=12, label="this plan")
    axes.set(xlabel="MB in files", ylabel=ERRORS[plan.measure], yscale="log")
    axes.legend(fontsize=8)
    return figure


def _everywhere(plan: QuantizationPlan) -> dict[str, tuple[int, float]]:
    """(bytes, error) of each format, where a parameter that cannot have it stays dense."""
    configs = {o.config for choice in plan.choices for o in choice.options if o.config is not None}
    found = {}
    for config in configs:
        options = [
            next((o for o in choice.options if o.config == config), choice.options[0])
            for choice in plan.choices
        ]
        size = plan.fixed + sum(option.bytes for option in options)
        found[config_text(config)] = (size, sum(option.error for option in options))
    return dict(sorted(found.items()))

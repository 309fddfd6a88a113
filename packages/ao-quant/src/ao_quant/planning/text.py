"""A plan as text for terminals and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

from ao_core import Config
from ao_core.ext import registry
from ao_core.ext.reports import aligned, shape_text, size_text
from ao_quant.configs import BaseConfig

if TYPE_CHECKING:
    from ao_quant.planning.result import Choice, QuantizationPlan, Uniform

__all__ = ["ERRORS", "LOSSES", "config_text", "everywhere_text", "plan_text"]

#: what the errors of a measure are
ERRORS = {
    "weight": "noise / signal of the weights",
    "layer": "noise / signal of the outputs of layers",
    "output": "noise / signal of the output",
    "kl": "KL divergence in bits",
}
#: what the losses of `autoquant` and `recommend` are, by measure
LOSSES = {"kl": "KL, nats", "output": "error"}
_HEADER = ("parameter", "shape", "format", "bits", "bytes", "error")
_RIGHT = (3, 4, 5)
_UNIFORM = ("format", "bytes", "error", "measured", "tokens/s", "")


def plan_text(plan: QuantizationPlan) -> str:
    """The choices as a table, the formats refused and the parameters kept by reason, and totals."""
    blocks = [aligned([_HEADER, *map(_row, plan.choices)], right=_RIGHT)] if plan.choices else []
    refused = [
        f"  {choice.fqn} in {config_text(config)}: {reason}"
        for choice in plan.choices
        for config, reason in choice.refused
    ]
    if refused:
        blocks.append("\n".join(["not possible:", *refused]))
    if plan.kept:
        sizes: Counter[str] = Counter()
        for kept in plan.kept:
            sizes[kept.reason] += kept.bytes
        counts = Counter(kept.reason for kept in plan.kept)
        lines = [f"  {n} × {reason}: {size_text(sizes[reason])}" for reason, n in counts.items()]
        blocks.append("\n".join([f"as they are ({len(plan.kept)}):", *lines]))
    if plan.uniform:
        rows: list[tuple[str, ...]] = [_UNIFORM]
        rows += [_uniform_row(each, plan) for each in sorted(plan.uniform, key=lambda u: u.bytes)]
        right: tuple[int, ...] = (1, 2, 3, 4)
        if plan.speed is None:
            rows, right = [(*row[:4], row[5]) for row in rows], right[:3]
        blocks.append("one recipe for all:\n" + aligned(rows, right=right))
    return "\n\n".join([*blocks, _totals(plan)])


def config_text(config: Config | None) -> str:
    """A configuration by the name of its recipe, if it is one."""
    if config is None:
        return "dense"
    names = (name for name, recipe in registry.recipes.items() if recipe.config == config)
    if (found := next(names, "")) or not isinstance(config, BaseConfig):
        return found or repr(config)
    algorithm = registry.algorithm_for(type(config))
    if algorithm is None or config != type(config)(config.base):
        return repr(config)
    return f"{algorithm.name}/{config_text(config.base)}"


class _OfAll(Protocol):
    """A recipe for all weights."""

    @property
    def config(self) -> Config: ...

    @property
    def heads(self) -> bool: ...


def everywhere_text(each: _OfAll, others: Sequence[_OfAll]) -> str:
    """A recipe for all weights, and whether output heads have it where another of the list spares them."""
    spared = any(not other.heads and other.config == each.config for other in others)
    return config_text(each.config) + (", heads too" if each.heads and spared else "")


def _row(choice: Choice) -> tuple[str, ...]:
    option = choice.option
    return (
        " = ".join((choice.fqn, *choice.tied)),
        shape_text(choice.shape),
        config_text(option.config),
        f"{8 * option.data / max(prod(choice.shape), 1):.2f}",
        size_text(option.bytes),
        f"{option.error:.3g}",
    )


def _uniform_row(uniform: Uniform, plan: QuantizationPlan) -> tuple[str, ...]:
    measured = "" if uniform.measured is None else f"{uniform.measured:.3g}"
    taken = "taken" if plan.taken == uniform else ""
    size = size_text(uniform.bytes)
    speed = "" if uniform.speed is None else f"{uniform.speed:.4g}"
    return (
        everywhere_text(uniform, plan.uniform),
        size,
        f"{uniform.error:.3g}",
        measured,
        speed,
        taken,
    )


def _totals(plan: QuantizationPlan) -> str:
    asked = size_text(int(plan.limit)) if plan.goal == "budget" else f"{plan.limit:g}"
    measured = "" if plan.measured is None else f" (together {plan.measured:.3g}, measured)"
    rank = plan.rank_correlation
    speed = "" if plan.speed is None else f", {plan.speed:.4g} tokens/s"
    agree = "" if rank is None else f"; predicted and measured errors agree in rank by {rank:.2f}"
    size = f"{size_text(plan.bytes)} in files at most, {plan.bits:.2f} bits per weight"
    return (
        f"{plan.goal}={asked}: {size}{speed}, "
        f"{ERRORS[plan.measure]} {plan.error:.3g}{measured}{agree}; plan {plan.hash}"
    )

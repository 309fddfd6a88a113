"""AutoRound: rounding that is learned by the outputs of a block, or of a layer where there are no blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor, Skip, Solved, Target
from ao_core.ext import ConfigError, is_transposed, registry
from ao_core.ext.calibration import Block, BlockWeight, Statistics, matrices, unmatrices
from ao_core.ext.quantizing import regridded
from ao_quant.algorithms.descent import Found, descend
from ao_quant.algorithms.rounding import Problem, learned, problem_of
from ao_quant.algorithms.solving import few, importance_start, refuses_gptq, sweep
from ao_quant.configs import AutoRoundConfig, GPTQConfig

__all__ = ["block_error", "refuses_autoround", "solve_autoround", "solve_autoround_block"]


class _Start(NamedTuple):
    """A weight in its format to begin with, and what is to be learned of it."""

    #: in its stored order
    q: QTensor
    problem: Problem
    target: Target
    #: of the parameter
    shape: tuple[int, ...]
    #: (E, out, in)
    weight: Tensor
    damping: float | None
    note: str

    def parameter(self, values: Tensor) -> Tensor:
        """Values in the shape of the codes as the parameter has them."""
        values = unmatrices(values.reshape(self.weight.shape), self.shape, self.target)
        return values.to(self.weight.dtype)

    def stored(self, values: Tensor) -> Tensor:
        """The inverse."""
        own = self.problem.weight
        return matrices(values, self.target).reshape(own.shape).to(own.dtype)


def solve_autoround(
    weight: Tensor, seen: tuple[Statistics, ...], config: AutoRoundConfig, target: Target
) -> Solved | Skip:
    """`Algorithm.solve`: the loss is the squared error of the layer's outputs for each row of data."""
    start = _start(weight, seen, config, target)
    if isinstance(start, Skip):
        return start
    rows = max(sum(each.rows for each in seen), 1)
    wide = start.problem.weight.dtype
    hessian = torch.stack([each["hessian"] for each in seen]).div_(rows).to(wide)
    dense = weight.to(wide)

    def change(values: Sequence[Tensor]) -> Tensor:
        return values[0].reshape(weight.shape) - dense

    def gradients(step: int, values: Sequence[Tensor]) -> list[Tensor]:
        return [(change(values) @ hessian).reshape(start.problem.weight.shape)]

    def loss(values: Sequence[Tensor]) -> float:
        delta = change(values)
        return float((delta @ hessian).mul_(delta).sum(dtype=torch.float64))

    found = descend(
        [start.problem], gradients, loss, config.iterations, config.first_rate, config.momentum
    )
    return _solved(start, found, 0, config, "the layer")


def solve_autoround_block(
    block: Block, weights: Sequence[BlockWeight]
) -> Mapping[str, Solved | Skip]:
    """`Algorithm.solve_block`: the loss is the mean squared error of the block's outputs."""
    config = _settings(weights)
    answers: dict[str, Solved | Skip] = {}
    starts: dict[str, _Start] = {}
    for each in weights:
        assert isinstance(each.config, AutoRoundConfig)
        start = _start(each.values, each.statistics, each.config, each.target)
        if isinstance(start, Skip):
            answers[each.fqn] = start
        else:
            starts[each.fqn] = start

    def named(values: Sequence[Tensor]) -> dict[str, Tensor]:
        pairs = zip(starts.items(), values, strict=True)
        return {fqn: start.parameter(each) for (fqn, start), each in pairs}

    order = _order(block.batches, config)

    def gradients(step: int, values: Sequence[Tensor]) -> list[Tensor]:
        leaves = {fqn: each.detach().requires_grad_() for fqn, each in named(values).items()}
        sums: list[Tensor] = []
        for number in order[step]:
            with torch.enable_grad():
                error = block_error(block, number, leaves, config.bfloat16)
                found = torch.autograd.grad(error, list(leaves.values()), materialize_grads=True)
            sums = [a.add_(b) for a, b in zip(sums, found, strict=True)] if sums else list(found)
        sums = block.summed(sums)
        return [start.stored(g) for start, g in zip(starts.values(), sums, strict=True)]

    def loss(values: Sequence[Tensor]) -> float:
        at = named(values)
        errors = sum(float(block_error(block, number, at)) for number in range(block.batches))
        total = torch.tensor([errors, block.batches], dtype=torch.float64)
        error, count = block.summed([total])[0].tolist()
        return float(error / count)

    problems = [start.problem for start in starts.values()]
    found = descend(
        problems, gradients, loss, config.iterations, config.first_rate, config.momentum
    )
    for place, (fqn, start) in enumerate(starts.items()):
        own = next(weight.config for weight in weights if weight.fqn == fqn)
        assert isinstance(own, AutoRoundConfig)
        answers[fqn] = _solved(start, found, place, own, block.name)
    return answers


def block_error(
    block: Block, number: int, weights: Mapping[str, Tensor], bfloat16: bool = False
) -> Tensor:
    """The mean squared error of what a block returns for a batch."""
    wanted = block.wanted(number)
    device = wanted[0].device.type
    with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
        found = block.run(number, weights)
    pairs = zip(found, wanted, strict=True)
    wide = torch.promote_types(wanted[0].dtype, torch.float32)
    return torch.stack([(a.to(wide) - b.to(wide)).square().mean() for a, b in pairs]).sum()


def _order(batches: int, config: AutoRoundConfig) -> list[list[int]]:
    """The batches of each step: in an order that is drawn, all of them before one comes again."""
    generator = torch.Generator().manual_seed(config.seed)
    count = min(config.batches, batches)
    queue: list[int] = []
    steps = []
    for _ in range(config.iterations):
        while len(queue) < count:
            queue += torch.randperm(batches, generator=generator).tolist()
        steps.append(queue[:count])
        del queue[:count]
    return steps


def _settings(weights: Sequence[BlockWeight]) -> AutoRoundConfig:
    """What the configurations of all weights of a block say, but for the format."""
    first, *others = (weight.config for weight in weights)
    assert isinstance(first, AutoRoundConfig)
    for weight, other in zip(weights[1:], others, strict=True):
        assert isinstance(other, AutoRoundConfig)
        if replace(other, base=first.base) != first:
            raise ConfigError(
                f"{weights[0].fqn} and {weight.fqn} are learned together and can differ in base only, not "
                f"{first!r} and {other!r}"
            )
    return first


def _start(
    weight: Tensor, seen: tuple[Statistics, ...], config: AutoRoundConfig, target: Target
) -> _Start | Skip:
    wide = torch.promote_types(weight.dtype, torch.float32)
    centers, damping = weight, None
    found: QTensor | Skip
    if config.start == "gptq":
        swept = sweep(weight, seen, GPTQConfig(config.base), target)
        if isinstance(swept, Skip):
            return swept
        found, centers = regridded(swept.q, swept.codes), swept.weight.to(wide)
        damping = swept.damping
    else:
        is_weighed = config.start == "importance"
        found = importance_start(weight, seen, config, target, is_weighed)
        if isinstance(found, Skip):
            return found
    shape = tuple(getattr(target.module, target.name).shape)
    problem = problem_of(centers, found, config.ranges)
    return _Start(found, problem, target, shape, weight, damping, few(seen, weight))


def _solved(start: _Start, found: Found, place: int, config: AutoRoundConfig, where: str) -> Solved:
    new = learned(start.q, found.best[place]) if found.steps else start.q
    values: Tensor = new.t() if is_transposed(start.target) else new
    note = f"rounding of {where}: the best of {config.iterations} steps is number {found.steps}"
    return Solved(
        values,
        config.base,
        damping=start.damping,
        loss=(found.before, found.after),
        note="; ".join(filter(None, (start.note, note))),
    )


def refuses_autoround(weight: Tensor, config: AutoRoundConfig, target: Target) -> str | None:
    """`refuses_gptq`, and number formats whose values are not evenly spaced."""
    if reason := refuses_gptq(weight, config, target):  # type: ignore[arg-type]
        return reason
    spec = config.weights.spec(tuple(weight.shape), weight.dtype)
    if spec.input:
        return (
            f"{spec} has input steps; choose them before, as RotateConfig does, not in the format"
        )
    affine = registry.layouts.get(spec.layout).affine
    if registry.dtypes.get(spec.dtype).kind != "int" or not affine:
        return f"{spec.dtype} has no even steps, by which offsets of the rounding are measured; use GPTQ"
    return None

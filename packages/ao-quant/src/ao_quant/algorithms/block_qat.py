"""Block-wise training: Adam on the weights of a block and their scales, by what the block returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ao_core import ComputeWeight, QTensor, Skip, Solved, Target
from ao_core.ext import ConfigError, QuantizationError, is_conv
from ao_core.ext.calibration import Block, BlockWeight, Statistics, matrices, unmatrices
from ao_core.ext.compute import deployed, format_of, rounded, rule_of
from ao_quant.algorithms.autoround import block_error
from ao_quant.configs import BlockQATConfig
from ao_quant.configs.qat import QATConfig
from ao_quant.qat.transform import matmuls_of

__all__ = ["solve_block_qat", "solve_layer_qat"]

#: steps for an epoch where one batch has all of the data
_LAYER_STEPS = 16


@dataclass(frozen=True)
class _Trained:
    """A weight in training, in the shape of its parameter, and its learned extra tensors."""

    weight: ComputeWeight
    extras: dict[str, Tensor]

    def values(self) -> Tensor:
        """Rounded, dense, with gradients."""
        found = rounded(self.weight, self.extras)
        if isinstance(found, QTensor):
            found = _Dense.apply(found)  # type: ignore[no-untyped-call]
        return found

    def copies(self) -> list[Tensor]:
        """What is trained, as it is now."""
        return [self.weight.memory.clone(), *(e.detach().clone() for e in self.extras.values())]

    def put_back(self, copies: Sequence[Tensor]) -> None:
        """The inverse."""
        with torch.no_grad():
            for tensor, copy in zip(
                (self.weight.memory, *self.extras.values()), copies, strict=True
            ):
                tensor.copy_(copy)


class _Dense(torch.autograd.Function):
    """The values of a quantized tensor, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, q: QTensor) -> Tensor:
        return q.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _start(values: Tensor, config: BlockQATConfig, target: Target) -> _Trained | Skip:
    """A weight (E, out, in) before its first step."""
    shape = getattr(target.module, target.name).shape
    dense = unmatrices(values, shape, target).clone()
    # a filter of a convolution is no matrix with one scale per block
    scales = "chosen" if is_conv(dense, target) else config.scales
    matmuls = matmuls_of(dense, QATConfig(config.base, scales=scales), target)
    if isinstance(matmuls, Skip):
        return matmuls
    rule, extras = rule_of(matmuls.output), dict[str, Tensor]()
    assert rule is not None
    assert matmuls.output is not None
    if rule.initial is not None:
        try:
            extras = rule.initial(dense, format_of(matmuls.output))
        except QuantizationError as error:
            return Skip(str(error))
    weight = ComputeWeight(dense, *matmuls, requires_grad=True)
    return _Trained(weight, {name: e.detach().requires_grad_() for name, e in extras.items()})


def solve_block_qat(block: Block, weights: Sequence[BlockWeight]) -> Mapping[str, Solved | Skip]:
    """`Algorithm.solve_block`: the loss is the mean squared error of the block's outputs."""
    config = _settings(weights)
    answers: dict[str, Solved | Skip] = {}
    starts: dict[str, _Trained] = {}
    for each in weights:
        assert isinstance(each.config, BlockQATConfig)
        start = _start(each.values, each.config, each.target)
        if isinstance(start, Skip):
            answers[each.fqn] = start
        else:
            starts[each.fqn] = start

    def error(number: int) -> Tensor:
        values = {fqn: start.values() for fqn, start in starts.items()}
        return block_error(block, number, values)

    found = _trained(list(starts.values()), error, block.batches, config) if starts else (0.0, 0.0)
    own = {each.fqn: each.config for each in weights}
    for fqn, start in starts.items():
        answers[fqn] = _solved(start, own[fqn], found, block.name)
    return answers


def solve_layer_qat(
    weight: Tensor, seen: tuple[Statistics, ...], config: BlockQATConfig, target: Target
) -> Solved | Skip:
    """`Algorithm.solve`: the loss is the squared error of the layer's outputs for each row of data."""
    start = _start(weight, config, target)
    if isinstance(start, Skip):
        return start
    rows = max(sum(each.rows for each in seen), 1)
    hessian = torch.stack([each["hessian"] for each in seen]).div_(rows)
    dense = unmatrices(weight, start.weight.shape, target)

    def error(number: int) -> Tensor:
        change = matrices(start.values() - dense, target).to(hessian.dtype)
        return ((change @ hessian) * change).sum()

    # one batch has all of the data
    steps = replace(config, epochs=_LAYER_STEPS * config.epochs)
    return _solved(start, config, _trained([start], error, 1, steps), "the layer")


def _trained(
    starts: Sequence[_Trained],
    error: Callable[[int], Tensor],
    batches: int,
    config: BlockQATConfig,
) -> tuple[float, float]:
    """Train weights together; the loss over all batches before and after, which is not above."""

    def loss() -> float:
        with torch.no_grad():
            return sum(float(error(number)) for number in range(batches)) / max(batches, 1)

    before, first = loss(), [start.copies() for start in starts]
    groups = [{"params": [start.weight for start in starts], "lr": config.lr}]
    if beside := [extra for start in starts for extra in start.extras.values()]:
        groups.append({"params": beside, "lr": config.scales_lr})
    optimizer = torch.optim.Adam(groups)
    generator = torch.Generator().manual_seed(config.seed)
    order = [
        number
        for _ in range(config.epochs)
        for number in torch.randperm(batches, generator=generator).tolist()
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(order))
    for number in order:
        with torch.enable_grad():
            error(number).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    after = loss()
    if after < before:
        return before, after
    for start, copies in zip(starts, first, strict=True):
        start.put_back(copies)
    return before, before


def _solved(start: _Trained, config: Any, found: tuple[float, float], where: str) -> Solved:
    with torch.no_grad():
        extras = {name: extra.detach() for name, extra in start.extras.items()}
        values = deployed(start.weight, extras)
    note = f"weights of {where} trained together"
    return Solved(values, config.base, loss=found, note=note)


def _settings(weights: Sequence[BlockWeight]) -> BlockQATConfig:
    """What the configurations of all weights of a block say, but for the format."""
    first, *others = (weight.config for weight in weights)
    assert isinstance(first, BlockQATConfig)
    for weight, other in zip(weights[1:], others, strict=True):
        assert isinstance(other, BlockQATConfig)
        if replace(other, base=first.base, scales=first.scales) != first:
            raise ConfigError(
                f"{weights[0].fqn} and {weight.fqn} are trained together and can differ in base and scales "
                f"only, not {first!r} and {other!r}"
            )
    return first

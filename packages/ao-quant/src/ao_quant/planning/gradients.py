"""How much the model's answer follows each output of a layer: predicts what a changed weight does to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext import ConfigError, is_transposed
from ao_core.ext.calibration import Inputs, Sample, call, evaluating, matrices, tensor_of
from ao_core.ext.quantizing import Decision

__all__ = ["Gradients", "output_gradients", "predicted_error"]


@dataclass(frozen=True)
class Gradients:
    """Of a model's answers by the outputs of layers."""

    #: by the name of a weight, the mean over rows of the squared gradient by each output (N,), float64
    squares: dict[str, Tensor]
    #: the sum of the squares of all answers
    signal: float


def output_gradients(
    model: nn.Module, batches: Sequence[Sample], entries: Sequence[Decision], seed: int = 0
) -> Gradients:
    """Squared gradients by outputs of layers, of the answers multiplied by random signs.

    With random signs r, the expectation of (∂ r·a / ∂ y)² is the squared length of ∂ a / ∂ y. One draw for
    each batch is enough, since the mean is over all rows.

    Raises:
        ConfigError: a weight is not that of a linear layer, or an answer depends on none of them.
    """
    generator = torch.Generator().manual_seed(seed)
    names: dict[int, str] = {}
    for entry in entries:
        for owner in entry.owners:
            is_layer = isinstance(owner.module, nn.Linear) or is_transposed(owner)
            if is_layer and owner.name == "weight":
                names[id(owner.module)] = entry.fqn
        if entry.fqn not in names.values():
            raise ConfigError(
                f"measure='gradient': {entry.fqn} is no weight of a linear layer, whose outputs could be "
                "seen; leave it out by filter_fn, or use measure='layer' or 'output'"
            )
    sums, rows, signal = dict[str, Tensor](), dict[str, int](), 0.0
    for batch in batches:
        seen: list[tuple[str, Tensor]] = []
        with ExitStack() as stack:
            stack.enter_context(evaluating(model))
            stack.enter_context(torch.enable_grad())
            for module in model.modules():
                if id(module) in names:
                    see: Callable[..., Tensor] = partial(_seen, seen, names[id(module)])
                    stack.callback(module.register_forward_hook(see).remove)
            answer = tensor_of(call(model, batch, "data"))
            signs = torch.randint(0, 2, answer.shape, generator=generator).to(answer) * 2 - 1
            if not answer.requires_grad:
                raise ConfigError("measure='gradient': the answer depends on no planned weight")
            outputs = [output for _, output in seen]
            found: Sequence[Tensor | None] = torch.autograd.grad(
                (answer * signs).sum(), outputs, allow_unused=True
            )
        signal += float(answer.detach().double().square().sum())
        for (name, output), gradient in zip(seen, found, strict=True):
            flat = output if gradient is None else gradient
            square = flat.detach().reshape(-1, output.shape[-1]).double().square()
            new = square.sum(0) * (0.0 if gradient is None else 1.0)
            sums[name] = sums[name] + new if name in sums else new
            rows[name] = rows.get(name, 0) + len(square)
    return Gradients({name: sums[name] / rows[name] for name in sums}, signal)


def _seen(
    seen: list[tuple[str, Tensor]], name: str, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """A hook of a layer: its output, by which there will be a gradient."""
    found = output if output.requires_grad else output.detach().requires_grad_()
    seen.append((name, found))
    return found


def predicted_error(
    entry: Decision, new: QTensor, inputs: Inputs | None, gradients: Gradients
) -> float | None:
    """Noise over signal of the model's answers with a quantized weight; None: its layer was not reached.

    Σ over outputs n of G_n (Δ H Δᵀ)_nn over Σ a², with G_n the mean squared gradient by the output.
    """
    if inputs is None or not inputs.rows or entry.fqn not in gradients.squares:
        return None
    change = new.dequantize().double() - entry.tensor.detach().double()
    (delta,), (statistics,) = matrices(change, entry.owners[0]), inputs.statistics
    errors = ((delta @ statistics["hessian"]) * delta).sum(-1)
    return float((errors * gradients.squares[entry.fqn].to(errors)).sum()) / gradients.signal

"""`precision_telemetry`: hooks on the layers for the steps that are looked at, and none otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ao_core import ComputeWeight, QTensor, Spec
from ao_core.ext import ConfigError, checked
from ao_core.ext.kernels import autocasted, local_shard
from ao_float8.convert import compute_weights
from ao_float8.telemetry.measure import PrecisionRecord, Tally, measure
from ao_float8.telemetry.outputs import JsonLines, TensorBoard, records_figure
from ao_float8.telemetry.warn import Updates, Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PrecisionTelemetry", "precision_telemetry"]


class PrecisionTelemetry:
    """What `precision_telemetry` gives: call `step` after each step of training.

    Attributes:
        records: all so far, in the order of their steps.
        unobserved: names of parameters that compute in low precision outside of `nn.Linear` modules:
            experts, and weights that functions use; and of those that FSDP2 gathers as float8, once
            they were seen, since their values before the cast are on no rank.
    """

    def __init__(self, model: nn.Module, every: int, sinks: list[Any]) -> None:
        self.records: list[PrecisionRecord] = []
        self._layers = dict(_linear_layers(model))
        names = [_name(name) for name, _ in compute_weights(model)]
        observed = {f"{name}.weight".lstrip(".") for name in self._layers}
        self.unobserved = tuple(name for name in names if name not in observed)
        self._every, self._sinks, self._step = every, sinks, 0
        self._tallies: dict[tuple[str, str, str], Tally] = {}
        self._sampled = ExitStack()
        # gathered shards are new memory each time, whose version says nothing
        whole = {name for name, m in self._layers.items() if isinstance(m.weight, ComputeWeight)}
        self._updates = Updates(whole)

    def step(self) -> None:
        """The end of a step of training, whatever number of forward and backward passes it had."""
        self.end()
        self._step += 1
        self.begin()

    def begin(self) -> None:
        """Put hooks on the layers if this step is looked at."""
        if self._step % self._every:
            return
        if "torch._dynamo" in sys.modules:  # compiled code would not see the hooks
            self._sampled.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in self._layers.items():
            # before the hooks of FSDP2, which shard the weight again
            hook = module.register_forward_hook(partial(self._forward, name), prepend=True)
            self._sampled.callback(hook.remove)

    def end(self) -> None:
        """Take the hooks away, and make records of what they saw."""
        self._sampled.close()
        self._updates.clear()
        found = [tally.record(self._step, *key) for key, tally in self._tallies.items()]
        self._tallies.clear()
        self.records += found
        for sink in self._sinks:
            for record in found:
                sink.look(record)

    def plot(self, field: str = "underflow_percent", tensor: str = "grad_output") -> Figure:
        """A figure of one number of one tensor over the steps, a line for each layer and matmul.

        Raises:
            ConfigError: records have no such number, or there are none of that tensor.
            MissingExtraError: matplotlib is not installed (extra "plot").
        """
        return records_figure(self.records, field, tensor)

    def _forward(self, name: str, module: nn.Linear, args: tuple[Any, ...], out: Tensor) -> None:
        weight, x = local_shard(module.weight), args[0].detach()
        if not isinstance(weight, ComputeWeight):
            return
        self._updates.look(name, weight, self._step)
        x, w = autocasted(x, weight.memory.detach())
        x = x.reshape(-1, x.shape[-1])
        output, grad_input, grad_weight = weight.matmuls
        self._see((name, "output", "input"), x, _act(output))
        if out.requires_grad:
            self._see((name, "grad_weight", "input"), x.t(), grad_weight)
            out.register_hook(partial(self._backward, name, grad_input, grad_weight))
        if isinstance(w, QTensor):
            self.unobserved = tuple(dict.fromkeys((*self.unobserved, f"{name}.weight".lstrip("."))))
            return
        self._see((name, "output", "weight"), w, output)
        if out.requires_grad:
            self._see((name, "grad_input", "weight"), w.t(), grad_input)

    def _backward(
        self, name: str, grad_input: Spec | None, grad_weight: Spec | None, grad: Tensor
    ) -> None:
        g = grad.detach().reshape(-1, grad.shape[-1])
        self._see((name, "grad_input", "grad_output"), g, _act(grad_input))
        self._see((name, "grad_weight", "grad_output"), g.t(), _act(grad_weight))

    def _see(self, key: tuple[str, str, str], x: Tensor, spec: Spec | None) -> None:
        if spec is not None:
            tally = self._tallies.get(key, Tally(spec))
            self._tallies[key] = tally.plus(measure(x, spec))


@checked
@contextmanager
def precision_telemetry(
    model: nn.Module,
    *,
    every: int = 1,
    underflow_percent: float = 50.0,
    jsonl: str | Path | None = None,
    tensorboard: Any = None,
) -> Iterator[PrecisionTelemetry]:
    """Measure what low precision does to a model while it trains; call `step()` after each step.

    Without this context, and between the steps that are looked at, nothing is added to the model, its
    graph or its compiled code. In the steps that are looked at, compiled parts run uncompiled.

    Args:
        model: a model with `ComputeWeight`s; its `nn.Linear` modules are looked at.
        every: look at the first step, and from there at one in so many.
        underflow_percent: warn, with the layer's name and once for each, where a larger share of a
            gradient becomes zero.
        jsonl: a file that gets one line of JSON for each record, as soon as its step is over.
        tensorboard: a folder for TensorBoard's files (extra "tensorboard"), or a `SummaryWriter`.

    Warns:
        StepWarning: the weights were updated while `step()` was not called, once.
        UnderflowWarning: a larger share of a gradient than `underflow_percent` becomes zero.
        NonFiniteWarning: an operand has NaN or infinities.

    Raises:
        ConfigError: `every` is not a positive number, or nothing in the model computes in low precision.
        MissingExtraError: TensorBoard is not installed.
    """
    if type(every) is not int or every < 1:
        raise ConfigError(f"every={every!r}: use a positive number of steps")
    if next(compute_weights(model), None) is None:
        raise ConfigError(
            "no parameter of the model computes in low precision; convert it first, e.g. with "
            "convert_to_float8_training(model)"
        )
    with ExitStack() as files:
        sinks: list[Any] = [Watch(underflow_percent)]
        if jsonl is not None:
            try:
                sinks.append(files.enter_context(JsonLines(Path(jsonl))))
            except OSError as error:
                raise ConfigError(f"jsonl={str(jsonl)!r}: {error}; give a file to write") from error
        if tensorboard is not None:
            sinks.append(files.enter_context(TensorBoard(tensorboard)))
        telemetry = PrecisionTelemetry(model, every, sinks)
        telemetry.begin()
        try:
            yield telemetry
        finally:
            telemetry.end()


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and isinstance(local_shard(module.weight), ComputeWeight):
            yield _name(name), module


def _name(name: str) -> str:
    """Without what `torch.compile` puts in front of the modules that it wraps."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _act(spec: Spec | None) -> Spec | None:
    return None if spec is None else spec.act

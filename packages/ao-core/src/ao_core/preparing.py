"""What `quantize_` does to a model before its weights are quantized: the order of a list, and transforms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.calibration.samples import Sample
from ao_core.config import Config, FqnToConfig, config_to_dict
from ao_core.errors import ConfigError, QuantizationError
from ao_core.graph.copies import names_of, sharing
from ao_core.installing import Undo
from ao_core.model_records import ModelTransform, Prepared
from ao_core.records import Target
from ao_core.registry import registry
from ao_core.report import ParameterRecord, Report
from ao_core.targets import Decision
from ao_core.tensor import QTensor
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.tensor.identity import become

__all__ = ["Stage", "changes", "prepare", "prepared_report", "put_in", "stages", "with_steps"]


#: (model, configuration) -> a decision on each parameter
Decided = Callable[[nn.Module, Config], Sequence[Decision]]


@dataclass(frozen=True)
class Stage:
    """One step of `quantize_`: all of a configuration that transforms the model, or all that quantizes."""

    config: Config
    prepares: bool


def stages(configs: Sequence[Config]) -> list[Stage]:
    """What a list of configurations does, in order.

    A configuration of a `ModelTransform` is two stages if it also says what is applied afterwards.

    Raises:
        ConfigError: an order that makes no sense.
    """
    found: list[Stage] = []
    before: list[Config] = []
    for config in configs:
        transforms = [(leaf, _transform(leaf)) for leaf in _leaves(config)]
        for leaf, transform in transforms:
            if transform is not None and (reason := transform.refuses(leaf, before)):
                last = type(before[-1]).__name__
                raise ConfigError(f"{type(leaf).__name__} after {last}: {reason}")
        before += [leaf for leaf, _ in transforms]
        if any(transform for _, transform in transforms):
            found.append(Stage(_mapped(config, lambda c, t: c if t else None), True))
            then = _mapped(config, lambda c, t: t.then(c) if t else c)
            if any(_leaves(then)):
                found.append(Stage(then, False))
        else:
            found.append(Stage(config, False))
    return found


def _transform(config: Config | None) -> ModelTransform | None:
    return None if config is None else registry.model_transform_for(type(config))


def _leaves(config: Config | None) -> list[Config]:
    if not isinstance(config, FqnToConfig):
        return [] if config is None else [config]
    return [each for _, each in config.entries if each is not None]


def _mapped(config: Config, change: Any) -> Any:
    """A configuration, or each one of a `FqnToConfig`, after `change(it, its transform)`."""
    if not isinstance(config, FqnToConfig):
        return change(config, _transform(config))
    return FqnToConfig({n: c and change(c, _transform(c)) for n, c in config.entries})


def with_steps(
    decisions: Sequence[Decision], steps: Mapping[str, ChosenSteps]
) -> Sequence[Decision]:
    """Decisions that know of the input steps that were chosen for their weights."""
    if not steps:
        return decisions
    return [replace(each, steps=steps.get(each.fqn, each.steps)) for each in decisions]


def prepare(
    model: nn.Module,
    config: Config,
    later: Sequence[Config],
    decided: Decided,
    batches: Sequence[Sample],
    steps: dict[str, ChosenSteps],
) -> tuple[nn.Module, dict[str, list[str]]]:
    """What transforms make of a dense model, which stays as it is, and notes on its parameters.

    Input steps of its weights are noted, too, for what quantizes them later.

    Args:
        model: to be transformed.
        config: of a `ModelTransform`, or a `FqnToConfig` of such.
        later: what quantizes the weights.
        decided: which parameters a configuration is for.
        batches: of data.
        steps: by weight, those chosen so far; gets more.

    Raises:
        QuantizationError: a weight is quantized already.
    """
    notes: dict[str, list[str]] = {}
    now = sharing(model)
    for leaf, weights in _weights(model, config, later, decided).items():
        transform = _transform(leaf)
        assert transform is not None
        there = with_steps([_moved(weight, now) for weight in weights], steps)
        made: Prepared = transform.apply(now, there, batches, leaf)
        now = made.model
        for name, more in made.steps.items():
            steps[name] = steps[name].then(more) if name in steps else more
        for name, note in made.notes.items():
            notes.setdefault(name, []).append(note)
    return now, notes


def put_in(model: nn.Module, new: nn.Module, undo: list[Undo]) -> set[str]:
    """Give a model the tensors of a copy of it; the names of those that changed. `undo` takes it all back."""
    changed: set[str] = set()
    for names, old, value in list(changes(model, new)):
        changed.update(names)
        _install(model, names, old, value, undo)
    return changed


def prepared_report(
    model: nn.Module, config: Config, changed: Collection[str], notes: Mapping[str, Sequence[str]]
) -> Report:
    """The report on what a transform did, by the names of what it changed."""
    records = [
        _record(name, tensor, name in changed, notes.get(name, []))
        for name, tensor in model.named_parameters()
    ]
    return Report(config_to_dict(config), tuple(records))


def _weights(
    model: nn.Module, config: Config, later: Sequence[Config], decided: Decided
) -> dict[Config, list[Decision]]:
    """The dense weights that each configuration is for, with what will quantize them, or None."""
    formats: dict[str, Config] = {}
    for other in later:
        for each in decided(model, other):
            if each.config is not None:
                formats.setdefault(each.fqn, each.config)
    by_name = isinstance(config, FqnToConfig)
    found: dict[Config, list[Decision]] = {} if by_name else {config: []}
    for each in decided(model, config):
        leaf = each.config if by_name else config
        if leaf is None or (each.fqn not in formats if formats else each.config is None):
            continue
        if isinstance(each.tensor, QTensor):
            raise QuantizationError(
                f"{each.fqn} is quantized already ({each.tensor.spec}), and {type(leaf).__name__} "
                "transforms dense weights; apply it before, in one list: [..., config]"
            )
        found.setdefault(leaf, []).append(replace(each, config=formats.get(each.fqn)))
    return found


def _moved(entry: Decision, model: nn.Module) -> Decision:
    """A decision on the same parameter of a copy of the model."""

    def owner(target: Target) -> Target:
        place = target.fqn.rpartition(".")[0]
        return replace(target, module=model.get_submodule(place))

    return replace(entry, owners=tuple(map(owner, entry.owners)))


def changes(model: nn.Module, new: nn.Module) -> Iterator[tuple[list[str], Tensor, Tensor]]:
    """The tensors of a model that are others in a copy of it: all their names, the old one and the new one.

    One that was tied, and is not any more, is another parameter under each name but the first.
    """
    entries: dict[int, list[tuple[str, Tensor]]] = {}
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            entries.setdefault(id(tensor), []).append((name, tensor))
    for places in entries.values():
        first, old = _tensor(new, places[0][0]), places[0][1]
        others = {name for name, _ in places[1:] if _tensor(new, name) is not first}
        for name in sorted(others):
            yield [name], old, _tensor(new, name)
        if first is not old and not torch.equal(first, old):
            yield [name for name, _ in places if name not in others], old, first


def _install(
    model: nn.Module, names: Sequence[str], old: Tensor, value: Tensor, undo: list[Undo]
) -> None:
    """Give a model another tensor under some names."""
    value, is_first = _like(old, value), names_of(model)[names[0]] == names[0]
    if is_first and isinstance(old, nn.Parameter) and old.requires_grad and become(old, value):
        undo.append(partial(torch.utils.swap_tensors, old, value))
        return
    _put(model, names, old, value, undo)


def _put(
    model: nn.Module, names: Sequence[str], old: Tensor, value: Tensor, undo: list[Undo]
) -> None:
    for name in names:
        module, leaf = _place(model, name)
        undo.append(partial(setattr, module, leaf, old))
        setattr(module, leaf, value)


def _like(old: Tensor, value: Tensor) -> Tensor:
    """A tensor that is no other's, a parameter where the old one is."""
    value = value.detach().clone()
    return nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value


def _tensor(model: nn.Module, name: str) -> Tensor:
    module, leaf = _place(model, name)
    found: Tensor = getattr(module, leaf)
    return found


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _record(name: str, tensor: Tensor, is_changed: bool, notes: Sequence[str]) -> ParameterRecord:
    size = tensor.stored_bytes if isinstance(tensor, QTensor) else tensor.nbytes
    status = "changed" if is_changed else "unchanged"
    reason = "" if is_changed else "the transform of the model leaves it as it is"
    note = "; ".join(notes)
    return ParameterRecord(name, status, reason, tuple(tensor.shape), size, size, note=note)

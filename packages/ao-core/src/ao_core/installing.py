"""New parameters put into a model: all of them, or none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ao_core.compute import ComputeWeight
from ao_core.compute.extras import fit_extras
from ao_core.compute.plain_state import keep_state_plain
from ao_core.compute.watching import watch_training
from ao_core.targets import Decision
from ao_core.tensor.described import describe, undescribe
from ao_core.tensor.identity import become

__all__ = ["Undo", "install", "try_to_move"]

Undo = Callable[[], object]


def install(
    model: nn.Module,
    changes: Sequence[tuple[Decision, nn.Parameter]],
    device: torch.device | str | None,
    undo: list[Undo] | None = None,
) -> list[str]:
    """Put each new parameter in the places of the one it replaces, and the whole model on `device`.

    Whatever raises meanwhile, the model is what it was before. Returns the names of trained parameters
    that something else still holds. `undo` gets what takes it all back, to be called in reverse.
    """
    done: list[Undo] = []
    watched = []
    try:
        for entry, parameter in changes:
            if (old := _replace(entry, parameter, done)) is not None and parameter.requires_grad:
                watched.append((entry.fqn, weakref.ref(old)))
            del old
            done.append(fit_extras([(owner.module, owner.name) for owner in entry.owners]))
        if device is not None:
            _remember_places(model, done)
            model.to(device)
    except BaseException:
        for step in reversed(done):
            step()
        raise
    fresh: list[Undo] = []
    for entry, _ in changes:
        for owner in entry.owners:
            if "extra_repr" not in vars(owner.module):
                fresh.append(partial(undescribe, owner.module))
            # the model's own, which may be the old object with what is new in it
            if isinstance(getattr(owner.module, owner.name), ComputeWeight):
                keep_state_plain(owner.module)
                if owner is entry.owners[0]:
                    watch_training(model, owner.module, owner.name, entry.fqn)
            describe(owner.module)
    if undo is not None:
        undo += [*fresh, *done]
    done.clear()  # and with it the last references to what was replaced
    return [fqn for fqn, watch in watched if watch() is not None]


def try_to_move(model: nn.Module) -> None:
    """Find out whether a module refuses to be moved: each goes where it is; what raises changes nothing."""
    done: list[Undo] = []
    _remember_places(model, done)
    try:
        model._apply(lambda tensor: tensor)
    finally:
        for step in reversed(done):
            step()


def _replace(entry: Decision, parameter: nn.Parameter, done: list[Undo]) -> Tensor | None:
    """Put a parameter in its places; the object that left them, if it did not become the new one.

    `done` gets what undoes it.
    """
    old = entry.tensor
    # what is trained stays the object it is, for optimizers; what is not may still be wanted as it was
    if parameter.requires_grad and become(old, parameter):
        done.append(lambda: torch.utils.swap_tensors(old, parameter))
        return None
    for owner in entry.owners:
        done.append(_setting(owner.module, owner.name, old))
        # not into the dictionary: recurrent layers hold their weights in a list of their own too
        setattr(owner.module, owner.name, parameter)
    return old


def _remember_places(model: nn.Module, done: list[Undo]) -> None:
    """What undoes a move of the model that torch gave up in the middle."""
    for module in model.modules():
        for name, held in (*module._parameters.items(), *module._buffers.items()):
            # torch gives a parameter other memory, or, on some devices, puts another in its place
            tensors = [] if held is None else [held] if held.grad is None else [held, held.grad]
            done.extend(_setting(tensor, "data", tensor.data) for tensor in tensors)
            done.append(_setting(module, name, held))


def _setting(owner: nn.Module | Tensor, name: str, value: object) -> Undo:
    return lambda: setattr(owner, name, value)

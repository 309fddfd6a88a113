"""What an update rule is: pure functions on float32 tensors, which know nothing of how state is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Options", "Rule", "Slot", "State", "check_betas", "check_least", "check_lr"]

#: options of a parameter group
Options = Mapping[str, Any]
#: name of a slot -> its values in float32
State = dict[str, Tensor]


class Slot(NamedTuple):
    """One moment that a rule keeps for each element of a parameter."""

    name: str
    #: whether values may be negative
    signed: bool = True


@dataclass(frozen=True)
class Rule:
    """An optimizer without its storage."""

    name: str
    #: the rule's own options with their defaults, "lr" among them
    defaults: Mapping[str, Any]
    #: the moments that a group with these options keeps
    slots: Callable[[Options], tuple[Slot, ...]]
    #: (param, grad, state, options, step): change the parameter and the moments in place. All float32,
    #: of one shape; the step counts from 1 and is a number, or a tensor where nothing may leave the
    #: device, and so are the options
    update: Callable[[Tensor, Tensor, State, Options, Any], None]
    #: raise ValueError, in torch's words, where an option cannot be
    check: Callable[[Options], None]
    #: whether each element is updated by itself, so that tensors may be cut and joined
    elementwise: bool = True
    #: whether only matrices have an update
    only_matrices: bool = False


def check_lr(options: Options) -> None:
    """The learning rate is a number, or a tensor of one element, of at least 0."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    check_least(options, lr="learning rate")


def check_least(options: Options, **names: str) -> None:
    """These options, with torch's names for them, are finite numbers of at least 0."""
    for option, called in names.items():
        value = options[option]
        if isinstance(value, Tensor) and value.is_meta:
            continue
        if not _is_number(value) or not 0.0 <= float(value) < inf:
            raise ValueError(
                f"Invalid {called}: {value} ({option}={value!r}); use a finite number from 0 on"
            )


def check_betas(options: Options, count: int = 2) -> None:
    """There are so many betas, each in [0, 1)."""
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != count:
        words = {2: "two", 3: "three"}
        raise ValueError(f"Invalid betas: {betas!r}; the rule has {words[count]}, in [0, 1)")
    for index, beta in enumerate(betas):
        if not _is_number(beta) or not 0.0 <= float(beta) < 1.0:
            raise ValueError(
                f"Invalid beta parameter at index {index}: {beta}; use a number in [0, 1)"
            )


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number or (isinstance(value, Tensor) and value.numel() == 1)


def decay_weights(param: Tensor, options: Options) -> None:
    """Decoupled weight decay: the parameter shrinks by lr * weight_decay."""
    if options["weight_decay"]:
        param.mul_(1 - options["lr"] * options["weight_decay"])


def add_decay(grad: Tensor, param: Tensor, options: Options) -> Tensor:
    """Weight decay as the gradient of a penalty: grad + weight_decay * param."""
    return grad.add(param, alpha=options["weight_decay"]) if options["weight_decay"] else grad


def root(value: Any) -> Any:
    """The square root of a number or a tensor."""
    return torch.sqrt(value) if isinstance(value, Tensor) else value**0.5

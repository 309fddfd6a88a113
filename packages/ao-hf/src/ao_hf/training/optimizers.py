"""ao's optimizers for the `Trainer`, by name: what its `optim` is for those that it knows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from ao_core.ext import ConfigError, UnknownNameError, registry

__all__ = ["optimizer"]


def optimizer(
    name: str, args: transformers.TrainingArguments, **options: Any
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """An optimizer for ``Trainer(optimizer_cls_and_kwargs=…)``, with what `args` says of optimizers.

    The Trainer makes it when training begins: with its groups with and without weight decay, and then its
    schedule. Its state is in the checkpoints of the Trainer.

    Args:
        name: of any optimizer that a package registers, as its class or as transformers writes names:
            "AdamW8bit" or "adamw_8bit", "adamw_4bit", "lion_8bit", "ademamix_8bit", ….
        args: `learning_rate` is used, and for Adam and AdamW `adam_beta1`, `adam_beta2` and `adam_epsilon`;
            the Trainer adds `weight_decay`.
        options: further arguments of the optimizer, such as `rounding`; they come before those of `args`.

    Raises:
        UnknownNameError: no such optimizer is installed; names a close one.
        ConfigError: an option that the optimizer does not have.
    """
    cls = _named(name)
    known = inspect.signature(cls).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    if not takes_all and (unknown := sorted(options.keys() - known.keys())):
        wanted = ", ".join(n for n in known if n != "params")
        raise ConfigError(f"{unknown[0]}={options[unknown[0]]!r}: {cls.__name__} has {wanted}")
    given: dict[str, Any] = {"lr": args.learning_rate}
    if _is_adam(known):
        given["betas"] = (args.adam_beta1, args.adam_beta2)
        given["eps"] = args.adam_epsilon
    return cls, {**given, **options}


def _named(name: str) -> type[torch.optim.Optimizer]:
    """The class of a registered optimizer; upper case and underscores do not count."""
    if not isinstance(name, str):
        raise ConfigError(f"name={name!r}: give the name of an optimizer, such as 'adamw_8bit'")
    for known, cls in registry.optimizers.items():
        if _plain(known) == _plain(name):
            return cls
    names = [_snake(known) for known in registry.optimizers.names()]
    raise UnknownNameError("optimizer", name, names, registry.notes(name))


def _is_adam(known: Mapping[str, inspect.Parameter]) -> bool:
    """Whether an optimizer has the moments of Adam: its options, and their defaults in torch."""
    defaults = [known[n].default if n in known else None for n in ("betas", "eps")]
    return defaults == [(0.9, 0.999), 1e-8]


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _snake(name: str) -> str:
    """From "AdamW8bit" to "adamw_8bit"."""
    return re.sub(r"(?<=[A-Za-z])(\d+bit|Fp8)$", r"_\1", name).lower()

"""Which parameters of a model a configuration is for: the owners of each, and why others stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ao_core.config import Config, FqnToConfig
from ao_core.errors import ConfigError
from ao_core.records import Target
from ao_core.weights import is_transposed

__all__ = ["FilterFn", "Plan", "default_reason", "plan"]

#: (module that owns the parameter, the module's fully qualified name) -> whether to quantize it
FilterFn = Callable[[nn.Module, str], bool]

_WEIGHTS = {
    nn.Linear: ("weight",),
    nn.Conv1d: ("weight",),
    nn.Conv2d: ("weight",),
    nn.Conv3d: ("weight",),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Plan:
    """One tensor of the model by all its owners, and what is to be done with it.

    It does not hold the tensor, so that memory is free as soon as a weight is replaced.
    """

    owners: tuple[Target, ...]
    #: None: it is kept, for `reason`
    config: Config | None
    reason: str = ""

    @property
    def fqn(self) -> str:
        """The first name of the tensor."""
        return self.owners[0].fqn

    @property
    def tensor(self) -> torch.Tensor:
        """What the first owner has now."""
        tensor = self.owners[0].module._parameters[self.owners[0].name]
        assert tensor is not None
        return tensor


def plan(model: nn.Module, config: Config, filter_fn: FilterFn | None) -> list[Plan]:
    """What to do with each parameter of the model, tied ones once; changes and checks nothing else.

    Raises:
        ConfigError: a name or regular expression of a `FqnToConfig` matches nothing.
    """
    owners: dict[int, list[Target]] = {}
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fqn = f"{module_fqn}.{name}" if module_fqn else name
                owners.setdefault(id(parameter), []).append(Target(fqn, module, name))
    rules = config if isinstance(config, FqnToConfig) else FqnToConfig({"*": config})
    used: set[str] = set()
    plans = [_plan_one(tuple(targets), rules, filter_fn, used) for targets in owners.values()]
    for key, _ in rules.entries:
        if key != "*" and key not in used:
            raise ConfigError(_nothing_matches(key, [p.fqn for p in plans]))
    return plans


def _plan_one(
    owners: tuple[Target, ...], rules: FqnToConfig, filter_fn: FilterFn | None, used: set[str]
) -> Plan:
    tensor = owners[0].module._parameters[owners[0].name]
    assert tensor is not None
    matches = [m for owner in owners if (m := _match(owner.fqn, rules)) is not None]
    used.update(key for key, _ in matches)
    # an exact name of one owner decides for all that are tied to it
    matches.sort(key=lambda m: (m[0] == "*", m[0].startswith("re:")))
    if not matches:
        return Plan(owners, None, "no name in the configuration matches it")
    key, config = matches[0]
    if config is None:
        return Plan(owners, None, f"the configuration keeps {key!r}")
    if filter_fn is not None:
        if not any(filter_fn(o.module, o.fqn.rpartition(".")[0]) for o in owners):
            return Plan(owners, None, "filter_fn left it out")
        reason = _not_a_weight(tensor)
    elif key == "*":
        reason = min((default_reason(o, tensor) for o in owners), key=len)
    else:
        reason = _not_a_weight(tensor)
    return Plan(owners, None if reason else config, reason)


def _match(fqn: str, rules: FqnToConfig) -> tuple[str, Config | None] | None:
    """The entry for a parameter: its name or its module's, then regular expressions, then "*"."""
    entries, module_fqn = dict(rules.entries), fqn.rpartition(".")[0]
    for key in (fqn, module_fqn):
        if key in entries:
            return key, entries[key]
    for key, config in rules.entries:
        if key.startswith("re:") and _regex(key).fullmatch(fqn):
            return key, config
        if key.startswith("re:") and _regex(key).fullmatch(module_fqn):
            return key, config
    return ("*", entries["*"]) if "*" in entries else None


def _regex(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key[len("re:") :])
    except re.error as error:
        raise ConfigError(f"{key!r} is no valid regular expression: {error}") from error


def _not_a_weight(tensor: torch.Tensor) -> str:
    if tensor.dim() < 2:
        return f"it has {tensor.dim()} dimension(s): a bias or a norm, not a weight matrix"
    return ""


def default_reason(owner: Target, tensor: torch.Tensor) -> str:
    """Why a parameter is kept when nobody named it; empty if it is a weight that ao quantizes."""
    if reason := _not_a_weight(tensor):
        return reason
    for module_type, names in _WEIGHTS.items():
        if isinstance(owner.module, module_type) and owner.name in names:
            return ""
    if is_transposed(owner):
        return ""
    if isinstance(owner.module, _LOOKUPS):
        return "embeddings are kept unless a FqnToConfig names them or filter_fn selects them"
    if tensor.dim() == 3 and tensor.shape[0] > 1:
        return ""  # the fused weights of experts: (experts, out, in)
    return (
        f"{type(owner.module).__name__}.{owner.name} is not known to be a weight matrix; "
        "name it in a FqnToConfig to quantize it"
    )


def _nothing_matches(key: str, fqns: list[str]) -> str:
    shown = ", ".join(fqns[:5]) + (", …" if len(fqns) > 5 else "")
    kind = "regular expression" if key.startswith("re:") else "name"
    return f"the {kind} {key!r} of the FqnToConfig matches no parameter or module; the model has {shown}"

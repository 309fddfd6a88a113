"""Which parameters of a model a configuration is for: the owners of each, and why others stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ao_core.config import Config, FqnToConfig
from ao_core.errors import ConfigError, UnknownNameError
from ao_core.records import Target
from ao_core.registry import registry
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.weights import is_transposed

__all__ = ["Decision", "FilterFn", "decide", "kept_by_default"]

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
#: why a head has another format than the configuration says
_HEAD = "an output head: it keeps 8 bits unless a FqnToConfig names it or filter_fn selects it"
#: where a module that `torch.compile` wraps is found
_COMPILED = "_orig_mod"


@dataclass(frozen=True)
class Decision:
    """One tensor of the model by all its owners, and what is to be done with it.

    It does not hold the tensor, so that memory is free when the weight is replaced.
    """

    owners: tuple[Target, ...]
    #: None: it is kept, for `reason`
    config: Config | None
    #: why it is kept, or why its configuration is not the one that was given
    reason: str = ""
    #: input steps that it is stored with, chosen by a transform of the model before
    steps: ChosenSteps | None = field(default=None, compare=False)

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


def decide(
    model: nn.Module,
    config: Config,
    filter_fn: FilterFn | None,
    more_names: Mapping[str, Sequence[str]] | None = None,
) -> list[Decision]:
    """What to do with each parameter of the model, tied ones once; changes and checks nothing else.

    Args:
        model: may be on the meta device.
        config: as for `quantize_`.
        filter_fn: as for `quantize_`.
        more_names: by the name of a parameter, others that it goes by; each is an owner in the decision, and
            a `FqnToConfig` may use it.

    Raises:
        ConfigError: a name or regular expression of a `FqnToConfig` matches nothing, or two of them give
            names of one tied parameter different configurations.
    """
    owners: dict[int, list[Target]] = {}
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fqn = f"{module_fqn}.{name}" if module_fqn else name
                names = dict.fromkeys((fqn, *(more_names or {}).get(fqn, ())))
                targets = owners.setdefault(id(parameter), [])
                targets += [Target(each, module, name) for each in names]
    rules = config if isinstance(config, FqnToConfig) else FqnToConfig({"*": config})
    used: set[str] = set()
    heads = _heads(owners.values())
    decisions = [
        _plan_one(tuple(targets), rules, filter_fn, used, head=key in heads)
        for key, targets in owners.items()
    ]
    for key, _ in rules.entries:
        if key != "*" and key not in used:
            raise ConfigError(_nothing_matches(key, [p.fqn for p in decisions]))
    return decisions


def _heads(tensors: Iterable[Sequence[Target]]) -> set[int]:
    """Identities of the parameters that give a model's logits: a row for each token of an embedding.

    They are known without the classes of models: the weight of a linear layer that is an embedding's too,
    or has the shape of one, where no more layers have it than embeddings do.
    """
    lookups, layers = Counter[torch.Size](), Counter[torch.Size]()
    tied, alike = set(), []
    for owners in tensors:
        tensor = owners[0].module._parameters[owners[0].name]
        assert tensor is not None
        looked_up = any(isinstance(owner.module, _LOOKUPS) for owner in owners)
        multiplied = any(isinstance(o.module, nn.Linear) and o.name == "weight" for o in owners)
        if looked_up:
            lookups[tensor.shape] += 1
        if looked_up and multiplied:
            tied.add(id(tensor))
        elif multiplied:
            layers[tensor.shape] += 1
            alike.append(tensor)
    return tied | {id(t) for t in alike if layers[t.shape] <= lookups[t.shape]}


def _plan_one(
    owners: tuple[Target, ...],
    rules: FqnToConfig,
    filter_fn: FilterFn | None,
    used: set[str],
    *,
    head: bool,
) -> Decision:
    tensor = owners[0].module._parameters[owners[0].name]
    assert tensor is not None
    matches = [m for owner in owners if (m := _match(owner.fqn, rules)) is not None]
    used.update(key for key, _ in matches)
    # an exact name of one owner decides for all that are tied to it
    matches.sort(key=lambda match: _rank(match[0]))
    if not matches:
        return Decision(owners, None, "no name in the configuration matches it")
    if reason := _conflict(owners, matches):
        raise ConfigError(reason)
    key, config = matches[0]
    kept: str | None
    if config is None:
        return Decision(owners, None, f"the configuration keeps {key!r}")
    if filter_fn is not None:
        if not any(filter_fn(o.module, _plain(o.fqn).rpartition(".")[0]) for o in owners):
            return Decision(owners, None, "filter_fn left it out")
        kept = _not_a_weight(tensor)
    elif key == "*":
        kept = _all_keep(owners, tensor)
        if kept is None and head and (wider := _for_head(config)) is not None:
            return Decision(owners, wider, _HEAD)
    else:
        kept = _not_a_weight(tensor)
    return Decision(owners, config) if kept is None else Decision(owners, None, kept)


def _all_keep(owners: Sequence[Target], tensor: torch.Tensor) -> str | None:
    """Why no owner of a parameter that nobody named wants it quantized, in the shortest sentence."""
    reasons = [kept_by_default(owner, tensor) for owner in owners]
    found = [reason for reason in reasons if reason is not None]
    return min(found, key=len) if len(found) == len(reasons) else None


def _for_head(config: Config) -> Config | None:
    """What a head gets in place of a configuration; None: nothing else."""
    try:
        return registry.transform_for(type(config)).for_head(config)
    except UnknownNameError:
        # an algorithm, or a pattern of pruning; where a transform is missing, applying it says so
        algorithm = registry.algorithm_for(type(config))
        return None if algorithm is None else algorithm.for_head(config)


def _plain(fqn: str) -> str:
    """A name without what `torch.compile` puts in front of the modules that it wraps."""
    return ".".join(part for part in fqn.split(".") if part != _COMPILED)


def _match(fqn: str, rules: FqnToConfig) -> tuple[str, Config | None] | None:
    """The entry for a parameter by its name in the model as it was written, or as it is now."""
    found = rules.match(plain := _plain(fqn))
    return rules.match(fqn) if plain != fqn and (found is None or found[0] == "*") else found


def _conflict(owners: tuple[Target, ...], matches: list[tuple[str, Config | None]]) -> str | None:
    """What two names of one parameter ask for, where it is not the same."""
    first, config = matches[0]
    for key, other in matches[1:]:
        if _rank(key) == _rank(first) and other != config:
            names = " and ".join(owner.fqn for owner in owners)
            return (
                f"{names} are one parameter, and the FqnToConfig has {first!r}: {config} and {key!r}: "
                f"{other} for it; give both names the same, or name only one"
            )
    return None


def _rank(key: str) -> int:
    """Exact names come first, then regular expressions, then "*"."""
    return 2 if key == "*" else int(key.startswith("re:"))


def _not_a_weight(tensor: torch.Tensor) -> str | None:
    if tensor.dim() < 2:
        return f"it has {tensor.dim()} dimension(s): a bias or a norm, not a weight matrix"
    return None


def kept_by_default(owner: Target, tensor: torch.Tensor) -> str | None:
    """Why a parameter is kept when nobody named it; None if it is a weight that ao quantizes."""
    if reason := _not_a_weight(tensor):
        return reason
    for module_type, names in _WEIGHTS.items():
        if isinstance(owner.module, module_type) and owner.name in names:
            return None
    if is_transposed(owner):
        return None
    if isinstance(owner.module, _LOOKUPS):
        return "embeddings are kept unless a FqnToConfig names them or filter_fn selects them"
    if tensor.dim() == 3 and tensor.shape[0] > 1:
        return None  # the fused weights of experts: (experts, out, in)
    return (
        f"{type(owner.module).__name__}.{owner.name} is not known to be a weight matrix; "
        "name it in a FqnToConfig to quantize it"
    )


def _nothing_matches(key: str, fqns: list[str]) -> str:
    shown = ", ".join(fqns[:5]) + (", …" if len(fqns) > 5 else "")
    kind = "regular expression" if key.startswith("re:") else "name"
    return f"the {kind} {key!r} of the FqnToConfig matches no parameter or module; the model has {shown}"

"""Loading a checkpoint into a model: everything is checked and read before the model changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ao_core.arguments import check_device, checked
from ao_core.errors import CheckpointError
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.saving.checkpoint import Checkpoint, open_checkpoint
from ao_core.tensor.saving.owners import Owner, owners_of
from ao_core.tensor.updates import STOCHASTIC
from ao_core.tensor.wrapper import Wrapper, is_converted

__all__ = ["Loaded", "load_model"]

_SHOWN = 20


class Loaded(NamedTuple):
    """Names without a counterpart; both are empty after a strict load."""

    #: names of the model that the checkpoint lacks
    missing: tuple[str, ...]
    #: names of the checkpoint that the model lacks
    unexpected: tuple[str, ...]


@checked
def load_model(
    model: nn.Module,
    dir: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    strict: bool = True,
    verify: bool = True,
) -> Loaded:
    """Put the tensors of a checkpoint into a model of the same architecture, in place.

    Tensors are replaced, not copied into, so they take the dtype and format of the checkpoint; make
    optimizers afterwards. A model built under ``torch.device("meta")`` never needs more memory than
    the loaded model and one tensor; one that has values keeps them until all is read, so that an
    error leaves it as it was. What was tied when it was saved is tied again.

    Args:
        model: dense or quantized, with values or on the meta device.
        dir: what `save_model` wrote, a safetensors checkpoint of another program, or one file.
        device: where to load to; None: where each tensor of the model is, the CPU for meta tensors.
        strict: raise where names of the model and the checkpoint differ, instead of returning them.
        verify: check every tensor against its checksum, where the checkpoint has them; this takes
            about 0.3 s for 1 GB.

    Raises:
        CheckpointError: there is no usable checkpoint, or it does not fit the model, which is as it
            was before.
    """
    check_device("device", device)
    checkpoint = open_checkpoint(dir)
    owners = list(owners_of(model))
    sources = _sources(owners, checkpoint)
    result = _compare(checkpoint, owners, sources, strict)
    if needs := checkpoint.missing_providers(set(sources.values())):
        raise CheckpointError(f"{checkpoint.path}: needs {'; and '.join(needs)}")
    read = _Reader(checkpoint, verify)
    moved: dict[int, Tensor] = {}
    changes: list[tuple[Owner, Tensor]] = []
    for owner in owners:
        where = _where(owner.tensor, device)
        if owner.persistent and owner.fqn in sources:
            changes.append((owner, read.for_owner(owner, sources[owner.fqn], where)))
        elif owner.tensor.device not in (where, torch.device("meta")):
            if id(owner.tensor) not in moved:
                moved[id(owner.tensor)] = _held(owner, owner.tensor.detach().to(where))
            changes.append((owner, moved[id(owner.tensor)]))
    for owner, tensor in changes:
        owner.put(tensor)
    return result


def _sources(owners: Sequence[Owner], checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the model -> entry; a tied name that the checkpoint lacks is served by its twin."""
    sources: dict[str, str] = {}
    of_tensor: dict[int, str] = {}
    persistent = [owner for owner in owners if owner.persistent]
    for owner in persistent:
        entry = checkpoint.ties.get(owner.fqn, owner.fqn)
        if entry in checkpoint.entries:
            sources[owner.fqn] = entry
            of_tensor.setdefault(id(owner.tensor), entry)
    for owner in persistent:
        if owner.fqn not in sources and id(owner.tensor) in of_tensor:
            sources[owner.fqn] = of_tensor[id(owner.tensor)]
    return sources


def _compare(
    checkpoint: Checkpoint, owners: Sequence[Owner], sources: dict[str, str], strict: bool
) -> Loaded:
    """Names without a counterpart; raises where shapes differ, and with `strict` where names do."""
    names = {owner.fqn: owner for owner in owners if owner.persistent}
    missing = tuple(name for name in names if name not in sources)
    unexpected = tuple(n for n in (*checkpoint.entries, *checkpoint.ties) if n not in names)
    shapes = [
        f"{fqn} is {tuple(names[fqn].tensor.shape)} in the model and {found} in the checkpoint"
        for fqn, entry in sources.items()
        if (found := checkpoint.entries[entry].shape) != tuple(names[fqn].tensor.shape)
    ]
    empty = [o.fqn for o in owners if not o.persistent and o.tensor.device.type == "meta"]
    problems = [_listed("shapes differ", shapes, "; ")]
    if strict:
        problems += [
            _listed("missing in the checkpoint", missing),
            _listed("unknown to the model", unexpected),
            _listed(
                "on the meta device and in no checkpoint, since they are buffers that are not "
                "persistent (make them on a real device, or fill them after strict=False)",
                empty,
            ),
        ]
    if found_any := [problem for problem in problems if problem]:
        hint = " (strict=False loads what fits)" if strict and not shapes else ""
        raise CheckpointError(
            f"{checkpoint.path} does not fit the model{hint}; {'. '.join(found_any)}"
        )
    return Loaded(missing, unexpected)


def _listed(title: str, names: Sequence[str], separator: str = ", ") -> str:
    if not names:
        return ""
    rest = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{title}: {separator.join(names[:_SHOWN])}{rest}"


def _where(tensor: Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


class _Reader:
    """Reads each entry once a device, so that names that are tied get one tensor."""

    def __init__(self, checkpoint: Checkpoint, verify: bool) -> None:
        self.checkpoint, self.verify = checkpoint, verify
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}
        self._parameters: dict[int, Tensor] = {}
        #: by what the model held: the tensors that replaced it
        self._successors: dict[int, list[Tensor]] = {}

    def for_owner(self, owner: Owner, entry: str, device: torch.device) -> Tensor:
        """The tensor that `owner` shall hold."""
        key = (entry, device)
        if key not in self._tensors:
            tensor = self.checkpoint.load(entry, device=device, verify=self.verify)
            # where other programs saved copies of a tensor that the model ties, they are one again
            twins = self._successors.setdefault(id(owner.tensor), [])
            self._tensors[key] = next((t for t in twins if _same(t, tensor)), tensor)
            twins.append(self._tensors[key])
        tensor = self._tensors[key]
        if not owner.is_parameter:
            return tensor
        if id(tensor) not in self._parameters:
            self._parameters[id(tensor)] = _held(owner, tensor)
        return self._parameters[id(tensor)]


def _same(a: Tensor, b: Tensor) -> bool:
    alike = type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a, b)


def _held(owner: Owner, tensor: Tensor) -> Tensor:
    """`tensor` as the kind of thing that the owner holds."""
    old: Any = owner.tensor
    if not owner.is_parameter:
        return tensor
    if isinstance(old, Wrapper) and not is_converted(tensor):
        tensor = old.like(tensor)
    learns = old.requires_grad and tensor.is_floating_point()
    if isinstance(tensor, QTensor) and not isinstance(old, QTensor):
        learns = learns and STOCHASTIC in tensor.spec.options  # as quantize_ leaves it
    return nn.Parameter(tensor, requires_grad=learns)

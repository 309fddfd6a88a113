"""Quantized weights on "disk" in a device map: they stay in the folder that is loaded.

transformers leaves such parameters on the meta device, and the hooks of accelerate read one array for each,
which a quantized weight is not. So the mapping that the hooks ask gets ours in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import OffloadedWeightsLoader
from safetensors import safe_open
from torch import Tensor, nn

from ao_core.ext import CheckpointError
from ao_core.ext.saving import Checkpoint, owners_of, rebuild, restore

__all__ = ["OffloadedWeights", "follow_hooks", "full_state"]


class _Place(NamedTuple):
    """Where a parameter is, and the logical dtype that it has in the model."""

    entry: str
    dtype: torch.dtype


class OffloadedWeights(Mapping[str, Tensor]):
    """The quantized weights of a model that are on disk, each read when it is asked for.

    Args:
        checkpoint: that holds them.
        places: by the name that a weight has in the model.
        device: where they are read to, in the layout of its best kernel.
    """

    def __init__(self, checkpoint: Checkpoint, places: Mapping[str, _Place], device: Any) -> None:
        self.checkpoint, self.places, self.device = checkpoint, places, device
        #: entries whose bytes were compared with their checksum, which is done once
        self._verified: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        entry, dtype = self.places[name]
        new = entry not in self._verified
        tensor = self.checkpoint.load(entry, device=self.device, verify=new)
        self._verified.add(entry)
        return tensor.to(dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def mapped(self, name: str) -> Tensor:
        """A weight in its canonical layout around mapped memory, which takes none until it is read."""
        entry, dtype = self.places[name]

        def take(leaf: str) -> Tensor:
            slot = self.checkpoint.slots[leaf]
            with safe_open(slot.path, "pt") as file:
                return restore(file.get_tensor(leaf), (slot.dtype, slot.shape))

        return rebuild(entry, self.checkpoint.records[entry], take).to(dtype)


def follow_hooks(model: Any, checkpoint: Checkpoint, entries: Mapping[str, str]) -> None:
    """Let the hooks of a dispatched model find its quantized weights that are on disk.

    Args:
        model: of transformers, dispatched by a device map.
        checkpoint: that it was loaded from.
        entries: name of a weight on disk -> that in the checkpoint.
    """
    shared = {target: entries.get(name) for target, name in model.all_tied_weights_keys.items()}
    known = {**{name: entry for name, entry in shared.items() if entry}, **entries}
    places = {}
    for owner in owners_of(model):
        if owner.fqn in known and owner.tensor.is_meta:
            places[owner.fqn] = _Place(known[owner.fqn], owner.tensor.dtype)
            owner.tensor.requires_grad_(False)
    for loader in _loaders(model):
        ours = OffloadedWeights(checkpoint, places, loader.device or "cpu")
        loader.state_dict = _Both(ours, loader.state_dict)


class _Both(Mapping[str, Tensor]):
    """Ours first, then what was there."""

    def __init__(self, ours: OffloadedWeights, others: Mapping[str, Tensor]) -> None:
        self.ours, self.others = ours, others

    def __getitem__(self, name: str) -> Tensor:
        return self.ours[name] if name in self.ours else self.others[name]

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in self.others

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self.ours), **dict.fromkeys(self.others)})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _loaders(model: nn.Module) -> list[OffloadedWeightsLoader]:
    """What the hooks of a model read offloaded parameters from; usually one for all."""
    found: dict[int, OffloadedWeightsLoader] = {}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):  # several in a row, or one
            weights = getattr(each, "weights_map", None)
            loader = getattr(weights, "dataset", weights)
            if isinstance(loader, OffloadedWeightsLoader):
                found[id(loader)] = loader
    return list(found.values())


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model; of what is on disk, around mapped memory. Tied weights are one tensor.

    Raises:
        CheckpointError: a tensor has no values anywhere.
    """
    state: dict[str, Tensor] = model.state_dict()
    if not any(tensor.is_meta for tensor in state.values()):
        return state
    loaders = _loaders(model)
    read: dict[object, Tensor] = {}
    return {name: _value(name, loaders, read) if t.is_meta else t for name, t in state.items()}


def _value(name: str, loaders: list[OffloadedWeightsLoader], read: dict[object, Tensor]) -> Tensor:
    """What is read for a name; `read` has what was read already, by its place."""
    for loader in loaders:
        held = loader.state_dict
        if isinstance(held, _Both) and name in held.ours:
            place: object = held.ours.places[name]
            return read.setdefault(place, held.ours.mapped(name))
        found: Tensor
        if name in loader.index:
            info = loader.index[name]
            place = (info.get("safetensors_file"), info.get("weight_name", name))
            found = loader[name]
            return read.setdefault(place, found)
        if name in held:
            found = loader[name]
            return found
    raise CheckpointError(
        f"{name} has no values: it is on the meta device, and nothing offloaded it"
    )

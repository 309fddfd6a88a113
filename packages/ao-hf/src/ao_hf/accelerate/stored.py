"""`StoredWeights`: the tensors of a checkpoint by name, each read when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ao_core import open_checkpoint
from ao_core.ext import CheckpointError
from ao_core.ext.saving import owners_of

__all__ = ["StoredWeights", "has_checkpoint", "is_within"]


class StoredWeights(Mapping[str, Tensor]):
    """What the hooks of accelerate take as a state dict, without the memory of one.

    Args:
        folder: of a checkpoint.
        device: where tensors are read to; quantized ones come in the layout of its best kernel.
    """

    def __init__(
        self, folder: str | os.PathLike[str], device: torch.device | str | int = "cpu"
    ) -> None:
        self.checkpoint = open_checkpoint(folder)
        self.device = torch.device(device)
        #: names whose bytes were compared with their checksum, which is done once
        self._verified: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        tensor = self.checkpoint.load(name, device=self.device, verify=name not in self._verified)
        self._verified.add(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.entries or name in self.checkpoint.ties

    def __iter__(self) -> Iterator[str]:
        yield from self.checkpoint.entries
        yield from self.checkpoint.ties

    def __len__(self) -> int:
        return len(self.checkpoint.entries) + len(self.checkpoint.ties)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor on disk, which are those it has in memory."""
        return self.checkpoint.entries[self.checkpoint.ties.get(name, name)].nbytes

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is stored in low precision."""
        return self.checkpoint.entries[self.checkpoint.ties.get(name, name)].spec is not None

    def check_fits(self, model: nn.Module, modules: Iterable[str]) -> None:
        """Raise `CheckpointError` where weights of these modules are missing, or have another shape."""
        within = tuple(modules)
        for owner in owners_of(model):
            if not (owner.persistent and is_within(owner.fqn, within)):
                continue
            where = f"{self.checkpoint.path} holds another model"
            if owner.fqn not in self:
                raise CheckpointError(f"{where}: {owner.fqn} is missing in it; give another folder")
            entry = self.checkpoint.entries[self.checkpoint.ties.get(owner.fqn, owner.fqn)]
            if entry.shape != tuple(owner.tensor.shape):
                raise CheckpointError(
                    f"{where}: {owner.fqn} is {entry.shape} in it and {tuple(owner.tensor.shape)} in the "
                    "model; give another folder"
                )


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has safetensors files, or the index of some."""
    path = Path(folder)
    return path.is_dir() and any(".safetensors" in file.name for file in path.iterdir())


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter is in one of the modules of a device map, or is named there itself."""
    return any(not module or name == module or name.startswith(f"{module}.") for module in modules)

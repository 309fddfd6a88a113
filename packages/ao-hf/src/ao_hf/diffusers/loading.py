"""Quantized tensors in the state dicts that diffusers reads: parts are put together before it sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ao_core.ext import CheckpointError
from ao_core.ext.saving import Checkpoint, open_files, restore

__all__ = ["Loading"]

#: what diffusers calls the weights of attention, and what old files call them, which it renames
_OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


class Loading:
    """A checkpoint that is loaded, one file after the other.

    A weight `w` is an entry without elements, and its parts are `w.qdata`, `w.scale`, … The weight comes with
    the entry, and parts are read from whichever file has them.
    """

    def __init__(self, files: Sequence[Any]) -> None:
        """Open the files.

        Raises:
            CheckpointError: they are no safetensors files, damaged, or need a plugin that is missing.
        """
        pickles = [str(file) for file in files if not str(file).endswith(".safetensors")]
        if pickles or not files:
            found = f"{Path(pickles[0]).name} is none" if pickles else "there are no files"
            raise CheckpointError(
                f"a model quantized by ao is loaded from safetensors files, and {found}"
            )
        self.checkpoint: Checkpoint = open_files(files)
        if missing := self.checkpoint.missing_providers():
            raise CheckpointError(f"{self.checkpoint.path}: needs {'; and '.join(missing)}")
        entries, ties = self.checkpoint.entries, self.checkpoint.ties
        self._parts = {leaf for fqn in self.checkpoint.records for leaf in entries[fqn].leaves}
        self._parts -= entries.keys()
        self._tied: dict[str, list[str]] = {}
        for name, owner in ties.items():
            self._tied.setdefault(owner, []).append(name)

    def names(self, read: Sequence[str]) -> list[str]:
        """Names of the tensors of a model, for those of plain tensors."""
        own = [name for name in read if name not in self._parts]
        return [*own, *self.checkpoint.ties]

    def tensors(self, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the plain tensors of one file are: quantized tensors, and dense ones.

        Raises:
            CheckpointError: bytes are not what was written.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in read.items():
            if name in self._parts:
                continue
            stored = self._stored(name)
            slot = self.checkpoint.slots.get(stored)
            if stored in self.checkpoint.records:
                found[name] = self.checkpoint.load(stored)
            else:
                found[name] = tensor if slot is None else restore(tensor, (slot.dtype, slot.shape))
            for tied in self._tied.get(stored, ()):
                found[tied] = found[name]
        return found

    def nbytes(self, name: str) -> int | None:
        """Bytes of a tensor on disk."""
        stored = self._stored(name)
        entry = self.checkpoint.entries.get(self.checkpoint.ties.get(stored, stored))
        return None if entry is None else entry.nbytes

    def _stored(self, name: str) -> str:
        """The name in the files; diffusers may have given it a newer one."""
        if name in self.checkpoint.slots:
            return name
        path, _, last = name.rpartition(".")
        for new, old in _OLD.items():
            if path.endswith(f".{new}"):
                return f"{path.removesuffix(new)}{old}.{last}"
        return name

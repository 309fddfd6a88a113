"""Opening a checkpoint: what is in it, read from headers alone and without the plugins it needs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ao_core.arguments import checked
from ao_core.errors import AoError, CheckpointError
from ao_core.regular_files import not_a_file
from ao_core.schema import FILE_NAME, Fields, OneOf, Optional, SchemaError, Table
from ao_core.spec import Spec
from ao_core.tensor.relayout import repack
from ao_core.tensor.saving.files import read_json
from ao_core.tensor.saving.header import CRC32, Provider, names_of
from ao_core.tensor.saving.leaves import PLACEHOLDER, Record, dtype_of, rebuild, spec_of
from ao_core.tensor.saving.names import MODEL, FileNames, names_of_files
from ao_core.tensor.saving.shards import Shard, Slot, open_shard

__all__ = [
    "Checkpoint",
    "Entry",
    "open_checkpoint",
    "open_files",
    "read_index",
]

_NUMBERED = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors")
#: what an index must be, ours or another program's
_INDEX_FIELDS = Fields(
    {"weight_map": Table(FILE_NAME)},
    # a program may write the metadata of files there, whose checksum is a text
    {"metadata": Optional(Fields({}, {"ao_crc32": OneOf((CRC32, Table(CRC32, FILE_NAME)))}))},
)
#: how often a checkpoint is opened that is replaced meanwhile, and seconds in between
_TRIES, _PAUSE = 10, 0.02
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer."""

    #: its name in the model
    fqn: str
    #: shape and dtype, the logical ones where it is quantized
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: bytes on disk
    nbytes: int
    #: None: it is dense
    spec: Spec | None
    #: names of the plain tensors that it is made of
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint; tensors are read when asked for."""

    #: the directory or file that was opened
    path: Path
    #: every parameter and buffer once, by name
    entries: dict[str, Entry]
    #: names that are tied to an entry
    ties: dict[str, str]
    #: who provides the number formats and layouts
    providers: tuple[Provider, ...]
    #: every plain tensor, by name
    slots: dict[str, Slot]
    #: of the quantized entries
    records: dict[str, Record]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(slot.nbytes for slot in self.slots.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files that hold tensors, sorted."""
        return tuple(sorted({slot.path for slot in self.slots.values()}))

    def missing_providers(self, fqns: Iterable[str] | None = None) -> list[str]:
        """For each number format or layout that is not here: a sentence on what to install.

        Args:
            fqns: count only what these entries need; None: all of them.
        """
        names = self.entries if fqns is None else fqns
        records = [self.records[fqn] for fqn in names if fqn in self.records]
        needed = {name for record in records for name in names_of(record)}
        needs = [p for p in self.providers if (p.kind, p.name) in needed]
        return [text for provider in needs if (text := provider.missing())]

    def read(self, leaf: str, *, verify: bool = True) -> Tensor:
        """One plain tensor, e.g. "encoder.0.weight.scale", on the CPU; needs no plugin."""
        return self.slots[leaf].read(verify=verify)

    def load(self, fqn: str, *, device: torch.device | str = "cpu", verify: bool = True) -> Tensor:
        """A parameter or buffer; a quantized one in the layout of the best kernel on the device.

        Raises:
            CheckpointError: its bytes are not what was written, its parts do not fit together, or
                its number format or layout is not installed.
        """
        fqn = self.ties.get(fqn, fqn)
        if missing := self.missing_providers([fqn]):
            raise CheckpointError(f"{self.path}: {fqn} needs {'; and '.join(missing)}")

        def take(leaf: str) -> Tensor:
            return self.slots[leaf].read(device, verify=verify)

        record = self.records.get(fqn)
        try:
            return take(fqn) if record is None else repack(rebuild(fqn, record, take))
        except CheckpointError:
            raise
        except (AoError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {fqn} cannot be rebuilt: {error}") from error


@checked
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a directory that `save_model` or anybody else wrote, an index, or one safetensors file.

    Of a directory with neither an index nor one file of all tensors, all safetensors files are one
    checkpoint. `model.safetensors` counts more than files of other names, and those more than their variants
    (`model.fp16.safetensors`). One that is replaced meanwhile is opened again; what was opened stays
    readable.

    Raises:
        CheckpointError: there is none, or it is a pickle, damaged, incomplete or too new. It names the
            file and the field.
    """
    path = Path(path)
    for tries in range(_TRIES, 0, -1):
        before = _pointers(path)
        try:
            return _opened(path, _shards(path), whole=path.is_dir() or path.suffix == ".json")
        except CheckpointError:
            if tries == 1 or _pointers(path) == before:
                raise
            time.sleep(_PAUSE)
    raise AssertionError("unreachable")


@checked
def open_files(files: Sequence[str | os.PathLike[str]]) -> Checkpoint:
    """Open safetensors files that are one checkpoint, wherever they are and whatever they are called.

    Raises:
        CheckpointError: one of them is damaged or too new, or a part of a tensor is in none of them.
    """
    paths = [Path(file) for file in files]
    if not paths:
        raise CheckpointError("files=[]: give at least one safetensors file")
    return _opened(paths[0].parent, [open_shard(path) for path in paths], whole=True)


def _pointers(path: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """Equal for equal states of the files of which one says what a checkpoint consists of."""
    names = names_of_files(path) or MODEL
    places = (path, path / names.index, path / names.single)
    return tuple(map(_stamp, places if path.is_dir() else places[:1]))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    # another file under the same name, or another content
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _opened(path: Path, shards: list[Shard], *, whole: bool) -> Checkpoint:
    """The checkpoint of some files; where they are not the whole, what is in others is left out.

    A header may describe the tensors of all files of the checkpoint, as those of programs do that write
    the same metadata into each file and split a tensor's parts among files.
    """
    headers = [shard.header for shard in shards]
    slots: dict[str, Slot] = {}
    for shard in shards:
        if twice := slots.keys() & shard.slots.keys():
            name = min(twice)
            raise CheckpointError(
                f"{shard.path}: {name!r} is in {slots[name].path.name} too; open one file by its path"
            )
        slots |= shard.slots
    entries: dict[str, Entry] = {}
    records: dict[str, Record] = {}
    inside: set[str] = set()
    for shard in shards:
        for fqn, record in shard.header.records.items():
            if not whole and not any(leaf in slots for leaf in (fqn, *_leaves(fqn, record))):
                continue
            if fqn in slots and not _stands_in(slots[fqn]):
                raise CheckpointError(f"{shard.path}: {fqn!r} is there twice")
            if records.setdefault(fqn, record) != record:
                raise CheckpointError(
                    f"{shard.path}: {fqn!r} is described differently in another file"
                )
            if fqn not in entries:
                entries[fqn] = _quantized(fqn, record, slots, shard.path)
                inside.update(entries[fqn].leaves)
    for name, slot in slots.items():
        if name not in inside:
            entries[name] = Entry(name, slot.shape, slot.dtype, slot.nbytes, None, (name,))
    ties: dict[str, str] = {}
    for shard in shards:
        for name, owner in shard.header.ties.items():
            if owner not in entries:
                if not whole:
                    continue
                raise CheckpointError(
                    f"{shard.path}: {name!r} is tied to {owner!r}, which is missing"
                )
            if name in entries or ties.get(name, owner) != owner:
                raise CheckpointError(
                    f"{shard.path}: {name!r} is tied to {owner!r}, and is there itself"
                )
            ties[name] = owner
    providers = sorted({p for h in headers for p in h.providers}, key=lambda p: (p.kind, p.name))
    return Checkpoint(path, entries, ties, tuple(providers), slots, records)


def _stands_in(slot: Slot) -> bool:
    """Whether it is what stands under the name of a quantized tensor."""
    return (slot.dtype, slot.shape) == PLACEHOLDER


def _quantized(fqn: str, record: Record, slots: Mapping[str, Slot], path: Path) -> Entry:
    own = [fqn] if fqn in slots else []
    leaves = (*own, *_leaves(fqn, record))
    for leaf in leaves:
        if leaf not in slots:
            raise CheckpointError(f"{path}: {leaf!r}, a part of {fqn!r}, is missing")
    nbytes = sum(slots[leaf].nbytes for leaf in leaves)
    shape, dtype = tuple(record["shape"]), dtype_of(record["dtype"])
    return Entry(fqn, shape, dtype, nbytes, spec_of(record), leaves)


def _leaves(fqn: str, record: Record) -> list[str]:
    names = []
    for name, nested in record["parts"].items():
        part = f"{fqn}.{name}"
        names += [part] if nested is None else _leaves(part, nested)
    return names


def _shards(path: Path) -> list[Shard]:
    """The files of a checkpoint; an index counts more than a single file beside it."""
    if not path.is_dir():
        if reason := not_a_file(path):
            reason = "there is no such directory or file" if reason == "is missing" else reason
            raise CheckpointError(f"{path}: {reason}")
        return _indexed(path) if path.suffix == ".json" else [open_shard(path)]
    if found := names_of_files(path):
        has_index = os.path.lexists(path / found.index)
        return _indexed(path / found.index) if has_index else [open_shard(path / found.single)]
    try:
        names = sorted(file.name for file in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    files = [path / n for n in names if n.endswith(".safetensors") and not n.startswith(".")]
    if files:
        _check_numbers(files)
        return [open_shard(file) for file in files]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    hint = (
        f"; {', '.join(pickles[:5])} is a pickle, which can run code when it is loaded, so ao "
        "does not: convert it to safetensors first"
    )
    raise CheckpointError(f"{path}: no safetensors file is here{hint if pickles else ''}")


def _check_numbers(files: list[Path]) -> None:
    """Raise `CheckpointError` if files that are numbered "2 of 3" are not all there."""
    names = {file.name for file in files}
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            start, count = FileNames(match[1]), int(match[2])
            wanted = start.shards(count)
            if lost := next((name for name in wanted if name not in names), None):
                raise CheckpointError(
                    f"{file.parent}: {lost} is missing, and so is {start.index}: an unfinished copy, "
                    "or a save that was killed"
                )


def read_index(index: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The file of each tensor, and the checksums of the headers of files, as an index has them.

    Raises:
        CheckpointError: it cannot be read, or is none; names the field.
    """
    try:
        data = read_json(index, _INDEX_FIELDS, "index")
    except SchemaError as error:
        raise CheckpointError(f"{index}: corrupted, it does not parse: {error}") from error
    checksums = (data.get("metadata") or {}).get("ao_crc32", {})
    return data["weight_map"], checksums if isinstance(checksums, dict) else {}


def _indexed(index: Path) -> list[Shard]:
    """The files that an index lists, each as it says."""
    weight_map, checksums = read_index(index)
    files = sorted(set(weight_map.values()) | set(checksums))
    for file in files:
        if reason := not_a_file(index.parent / file):
            raise CheckpointError(f"{index}: lists {file}, which {reason}")
    shards = [open_shard(index.parent / file) for file in files]
    names: dict[str, set[str]] = {file: set() for file in files}
    for name, file in weight_map.items():
        names[file].add(name)
    for shard in shards:
        listed = names[shard.path.name]
        if lost := sorted(listed - shard.slots.keys()):
            raise CheckpointError(f"{shard.path}: lacks {lost[0]!r}, which {index.name} lists")
        if extra := sorted(shard.slots.keys() - listed):
            raise CheckpointError(f"{index}: does not list {extra[0]!r} of {shard.path.name}")
        if checksums.get(shard.path.name, shard.header.crc32) != shard.header.crc32:
            raise CheckpointError(f"{shard.path}: is of another checkpoint than {index.name}")
    return shards

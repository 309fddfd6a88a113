"""What a conversion has done so far, on disk: bytes of tensors one after the other, a line for each weight.

A line is written when the bytes before it are. Whatever kills the process, the next one goes on behind the
last line whose bytes are there; what is behind them is cut off.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core.ext import CheckpointError
from ao_core.ext.interchange import (
    Source,
    checksum,
    file_header,
    memory_of,
    store,
    write_file,
)
from ao_quant.interchange.kept import Kept, dtype_of

__all__ = ["Done", "Journal"]

_BUFFER = 1 << 20


@dataclass
class Done:
    """What was written for one weight or one dense tensor, as a line of the journal has it."""

    name: str
    #: number of the file
    shard: int
    #: name -> [dtype, shape, bytes from, bytes to, checksum]
    leaves: dict[str, list[Any]]
    #: of ao's own format
    record: dict[str, Any] | None = None
    #: of the forms that a file cannot hold: name -> [dtype, shape]
    raw: dict[str, list[Any]] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    verdict: dict[str, Any] | None = None


class Journal:
    """The work of one conversion; `done` has what is there already.

    Args:
        work: its folder, made where it does not exist.
        limit: bytes of a file.
    """

    def __init__(self, work: Path, limit: int) -> None:
        self.work, self.limit = work, limit
        work.mkdir(exist_ok=True)
        self.done: list[Done] = []
        #: where the bytes of each file end
        self._ends: dict[int, int] = {}
        self._lines = work / "journal"
        self._recover()

    def _recover(self) -> None:
        """Keep the lines whose bytes are there, and cut off what is behind."""
        text = self._lines.read_bytes() if self._lines.exists() else b""
        keep = 0
        for line in text.splitlines(keepends=True):
            try:
                entry = Done(**json.loads(line))
                whole = line.endswith(b"\n") and self._is_there(entry)
            except (ValueError, TypeError, KeyError):
                whole = False
            if not whole:
                break
            self._keep(entry)
            keep += len(line)
        if keep != len(text):
            with self._lines.open("r+b") as file:
                file.truncate(keep)
        for path in self.work.glob("data-*"):
            number = int(path.name.removeprefix("data-"))
            if path.stat().st_size > self._ends.get(number, 0):
                with path.open("r+b") as file:
                    file.truncate(self._ends.get(number, 0))

    def _is_there(self, entry: Done) -> bool:
        path = self._data(entry.shard)
        if not path.exists():
            return False
        with path.open("rb") as file:
            for _, _, start, end, crc in entry.leaves.values():
                file.seek(start)
                data, found = end - start, 0
                while data > 0:
                    piece = file.read(min(data, _BUFFER))
                    if not piece:
                        return False
                    found, data = zlib.crc32(piece, found), data - len(piece)
                if f"{found:08x}" != crc[8:]:
                    return False
        return True

    def _keep(self, entry: Done) -> None:
        self.done.append(entry)
        for _, _, _, end, _ in entry.leaves.values():
            self._ends[entry.shard] = max(self._ends.get(entry.shard, 0), end)

    def _data(self, shard: int) -> Path:
        return self.work / f"data-{shard}"

    def keep(self, tensors: Mapping[str, Tensor]) -> Kept:
        """Write the bytes of tensors behind the others, in the last file if they fit there, else in the next.

        They are nobody's until `add` has them; what is kept next takes their place.
        """
        stored, raw = store({each: tensor.cpu() for each, tensor in tensors.items()})
        shard = self.done[-1].shard if self.done else 0
        start = self._ends.get(shard, 0)
        if start and start + sum(t.nbytes for t in stored.values()) > self.limit:
            shard, start = shard + 1, 0
        leaves = {}
        with self._data(shard).open("r+b" if self._data(shard).exists() else "xb") as file:
            file.seek(start)
            for each, tensor in stored.items():
                data = memory_of(tensor)
                file.write(data)
                end = start + tensor.nbytes
                crc = f"{checksum(tensor)}{zlib.crc32(data):08x}"
                form = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
                leaves[each] = [*form, start, end, crc]
                start = end
        return Kept(self._data(shard), shard, leaves, raw)

    def add(self, name: str, tensors: Mapping[str, Tensor], **fields: Any) -> None:
        """Note the tensors of a weight, which are written unless they are kept already."""
        kept = tensors if isinstance(tensors, Kept) else self.keep(tensors)
        held = {n: [str(d).removeprefix("torch."), list(s)] for n, (d, s) in kept.raw.items()}
        entry = Done(name, kept.shard, kept.leaves, raw=held, **fields)
        with self._lines.open("ab") as file:
            file.write(json.dumps(vars(entry)).encode() + b"\n")
        self._keep(entry)

    def source(self, like: Source) -> Source:
        """All tensors that were written, with the texts of another source; they are mapped, not read."""
        leaves = {name: (e.shard, *leaf) for e in self.done for name, leaf in e.leaves.items()}
        forms = {
            name: (dtype_of(dtype), tuple(shape)) for name, (_, dtype, shape, *_) in leaves.items()
        }

        def take(name: str) -> Tensor:
            shard, _, _, start, end, _ = leaves[name]
            dtype, shape = forms[name]
            if start == end:
                return torch.empty(shape, dtype=dtype)
            path = str(self._data(shard))
            data = torch.from_file(path, shared=False, size=end, dtype=torch.uint8)[start:end]
            aligned = data if start % dtype.itemsize == 0 else data.clone()
            return aligned.view(dtype).reshape(shape)

        return replace(like, forms=forms, take=take)

    def shards(self) -> list[list[Done]]:
        """What each file holds."""
        count = 1 + max((entry.shard for entry in self.done), default=0)
        return [[entry for entry in self.done if entry.shard == number] for number in range(count)]

    def finish(self, shard: int, path: Path, metadata: Mapping[str, str]) -> dict[str, int]:
        """Write the safetensors file of a shard; returns the bytes of each tensor.

        Raises:
            CheckpointError: two tensors have one name.
        """
        leaves: dict[str, list[Any]] = {}
        for entry in self.shards()[shard]:
            if twice := leaves.keys() & entry.leaves.keys():
                raise CheckpointError(f"two tensors would be stored as {min(twice)!r}")
            leaves |= entry.leaves
        forms = {
            name: (dtype_of(dtype), tuple(shape)) for name, (dtype, shape, *_) in leaves.items()
        }
        header, order = file_header(forms, metadata)

        def buffers() -> Iterator[bytes]:
            yield header
            if not leaves:
                return
            with self._data(shard).open("rb") as file:
                for name in order:
                    _, _, start, end, _ = leaves[name]
                    file.seek(start)
                    while start < end:
                        yield (piece := file.read(min(_BUFFER, end - start)))
                        start += len(piece)

        path.unlink(missing_ok=True)
        write_file(path, buffers())
        return {name: end - start for name, (_, _, start, end, _) in leaves.items()}

"""Importance matrices: made from data, and read and written in the two formats of llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_core.ext import CheckpointError, checked, checked_but
from ao_core.ext.calibration import (
    SQUARES,
    Data,
    Seen,
    Statistics,
    batches_of,
    collect,
    unobservable,
)
from ao_core.ext.quantizing import Progress, decide
from ao_core.ext.saving import not_a_file
from ao_quant.configs.ints import Int8WeightOnlyConfig
from ao_quant.gguf.names import places
from ao_quant.gguf.read import read_gguf
from ao_quant.gguf.write import write_gguf

__all__ = ["Imatrix", "imatrix_of", "read_imatrix", "write_imatrix"]

#: what follows the name of a weight in the names of its two tensors
_SUMS, _COUNTS = ".in_sum2", ".counts"
#: longest name of a tensor that is believed in a file of the older format
_NAME_BYTES = 1 << 12


@dataclass(frozen=True)
class Imatrix:
    """Σ x² of the inputs of weights, by the names of the weights.

    Attributes:
        sums: Σ x² of each input channel, float32 (E, K): one row, or one for each expert.
        rows: the number of rows that were added up, float32 (E,).
        chunks: pieces of text that were run.
        chunk_size: tokens of each.
        datasets: where the text came from.
    """

    sums: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    chunks: int = 0
    chunk_size: int = 512
    datasets: tuple[str, ...] = ()

    def means(self, name: str) -> Tensor:
        """The mean of x² of each input channel, (E, K); 1 for experts that saw nothing."""
        rows = self.rows[name][:, None]
        return torch.where(rows > 0, self.sums[name] / rows.clamp(min=1), 1.0)

    def seen(self) -> Seen:
        """The same as `data` of `quantize_`, for algorithms that need no more, such as `ImatrixConfig`."""
        return Seen({name: self._statistics(name) for name in self.sums})

    def _statistics(self, name: str) -> tuple[Statistics, ...]:
        return tuple(
            Statistics((SQUARES,), int(rows), {"squares": sums.double()} if rows else {})
            for sums, rows in zip(self.sums[name], self.rows[name], strict=True)
        )


@checked_but("data")
def imatrix_of(
    model: nn.Module, data: Data, *, datasets: tuple[str, ...] = (), progress: Progress = None
) -> Imatrix:
    """The importance matrix of a model as it is, by the names of its parameters.

    Args:
        model: any module; it is run in evaluation mode and not changed.
        data: batches, as for `quantize_`.
        datasets: where they come from, for the file.
        progress: as for `quantize_`, over the batches.

    Raises:
        ConfigError: no data, or none that the model can be called with.
        QuantizationError: inputs have NaN or inf.
    """
    batches = batches_of(data, "imatrix_of")
    entries = [
        entry
        for entry in decide(model, Int8WeightOnlyConfig(), None)
        if entry.config is not None and unobservable(entry) is None
    ]
    sums, rows = {}, {}
    for group in collect(model, batches, entries, lambda _: (SQUARES,), progress):
        seen = [each for each in group.statistics if each.rows]
        empty = torch.zeros_like(seen[0]["squares"])
        squares = [each["squares"] if each.rows else empty for each in group.statistics]
        for entry in group.entries:
            sums[entry.fqn] = torch.stack(squares).float().cpu()
            rows[entry.fqn] = torch.tensor([float(each.rows) for each in group.statistics])
    most = max((int(each.max()) for each in rows.values()), default=0)
    return Imatrix(sums, rows, len(batches), ceil(most / len(batches)), datasets)


@checked
def read_imatrix(
    path: str | PathLike[str], *, names: str = "file", architecture: str = "llama"
) -> Imatrix:
    """The importance matrix in a file of llama.cpp: GGUF, or the older binary format.

    Args:
        path: the file.
        names: "file", or "transformers" for the names of a model's parameters there, as for `read_gguf`.
        architecture: whose names these are; files of importance do not say.

    Raises:
        CheckpointError: it is neither, or is damaged, or its names in transformers are not known.
        ConfigError: no such `names`.
        MissingExtraError: it is GGUF, and the package `gguf` is not installed.
    """
    if reason := not_a_file(Path(path)):
        raise CheckpointError(f"{path}: {reason}")
    with Path(path).open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    found = _read_gguf(path) if is_gguf else _read_binary(Path(path))
    return _renamed(found, names, architecture, "model")


@checked
def write_imatrix(
    path: str | PathLike[str],
    imatrix: Imatrix,
    *,
    names: str = "file",
    architecture: str = "llama",
    binary: bool = False,
) -> None:
    """Write a file that `llama-quantize --imatrix` takes.

    Args:
        path: the file.
        imatrix: what it shall hold.
        names: what `imatrix` is named by, as for `read_imatrix`.
        architecture: as for `read_imatrix`.
        binary: whether to write the older binary format in place of GGUF.

    Raises:
        CheckpointError: a name in the file is not known.
        MissingExtraError: the package `gguf` is not installed.
    """
    found = _renamed(imatrix, names, architecture, "file")
    if binary:
        Path(path).write_bytes(_binary(found))
        return
    tensors: dict[str, Tensor] = {}
    for name in sorted(found.sums):
        tensors[name + _SUMS] = found.sums[name].float().contiguous()
        tensors[name + _COUNTS] = found.rows[name].float()[:, None].contiguous()
    metadata: dict[str, Any] = {
        "general.type": "imatrix",
        "imatrix.datasets": list(found.datasets) or [""],
        "imatrix.chunk_count": found.chunks,
        "imatrix.chunk_size": found.chunk_size,
    }
    write_gguf(path, tensors, metadata)


def _renamed(found: Imatrix, names: str, architecture: str, to: str) -> Imatrix:
    """With the names that weights have in the model, or in the file."""
    # columns are in the same order whichever heads the rows are of
    metadata = {"general.architecture": architecture, f"{architecture}.attention.head_count": 1}
    known = places(names, found.sums, metadata)
    new = {name: getattr(place, to) for name, place in known.items()}
    sums, rows = (
        {new[name]: value for name, value in each.items()} for each in (found.sums, found.rows)
    )
    return Imatrix(sums, rows, found.chunks, found.chunk_size, found.datasets)


def _read_gguf(path: str | PathLike[str]) -> Imatrix:
    tensors, metadata = read_gguf(path)
    if metadata.get("general.type") != "imatrix":
        raise CheckpointError(
            f"{path} is a GGUF file, but no importance matrix: its general.type is "
            f"{metadata.get('general.type')!r}"
        )
    sums, rows = {}, {}
    for name in (each.removesuffix(_SUMS) for each in tensors if each.endswith(_SUMS)):
        if name + _COUNTS not in tensors:
            raise CheckpointError(
                f"{path}: {name + _SUMS!r} is there, and {name + _COUNTS!r} is not"
            )
        sums[name] = tensors[name + _SUMS].float().reshape(-1, tensors[name + _SUMS].shape[-1])
        rows[name] = tensors[name + _COUNTS].float().reshape(-1)
        if len(rows[name]) != len(sums[name]):
            raise CheckpointError(
                f"{path}: {name!r} has {len(sums[name])} rows of sums and {len(rows[name])} counts"
            )
    return Imatrix(
        sums,
        rows,
        int(metadata.get("imatrix.chunk_count", 0)),
        int(metadata.get("imatrix.chunk_size", 512)),
        tuple(metadata.get("imatrix.datasets", ())),
    )


def _read_binary(path: Path) -> Imatrix:
    """The older format: means of x², times the number of calls."""
    data, sums, rows = path.read_bytes(), {}, {}

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is no importance matrix, or it is damaged: {what}")

    def number(place: int) -> int:
        if place + 4 > len(data):
            raise damaged("it ends early")
        return int(struct.unpack_from("<i", data, place)[0])

    count, place = number(0), 4
    if count < 1:
        raise damaged(f"it says that it has {count} entries")
    for _ in range(count):
        size = number(place)
        if not 0 < size <= _NAME_BYTES:
            raise damaged(f"a name of {size} bytes")
        name = data[place + 4 : place + 4 + size].decode("utf-8", "replace")
        calls, values = number(place + 4 + size), number(place + 8 + size)
        place += 12 + size
        if values < 1 or place + 4 * values > len(data):
            raise damaged(f"{name!r} has {values} values")
        means = torch.frombuffer(bytearray(data[place : place + 4 * values]), dtype=torch.float32)
        # tokens are not in the file: the calls, of one token each
        sums[name], rows[name] = means[None], torch.tensor([float(max(calls, 1))])
        place += 4 * values
    chunks = number(place) if place + 4 <= len(data) else 0
    size = number(place + 4) if place + 8 <= len(data) else 0
    text = data[place + 8 : place + 8 + max(size, 0)].decode("utf-8", "replace")
    return Imatrix(sums, rows, chunks, 1, (text,) if text else ())


def _binary(found: Imatrix) -> bytes:
    parts = [struct.pack("<i", len(found.sums))]
    for name in sorted(found.sums):
        calls = ceil(float(found.rows[name].max()) / max(found.chunk_size, 1))
        values = (found.means(name) * calls).float().reshape(-1)
        encoded = name.encode()
        parts.append(struct.pack("<i", len(encoded)) + encoded)
        parts.append(struct.pack("<ii", calls, values.numel()) + values.numpy().tobytes())
    text = (found.datasets[-1] if found.datasets else "").encode()
    return b"".join([*parts, struct.pack("<ii", found.chunks, len(text)), text])

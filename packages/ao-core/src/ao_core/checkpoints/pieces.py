"""Pieces: files of one large tensor or of some small ones, in which the work is kept until it is whole.

A piece is a checkpoint by itself, with the report on its tensors in its metadata. Which tensors it holds
follows from the source alone, so a piece that is there is a piece that is done.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core.checkpoints.convert import Converted, convert
from ao_core.checkpoints.homes import Step
from ao_core.checkpoints.job import Job
from ao_core.checkpoints.progress import Advance
from ao_core.errors import CheckpointError, ConfigError
from ao_core.registry import Table, registry
from ao_core.report import Report
from ao_core.schema import SchemaError
from ao_core.tensor.saving import Entry, open_checkpoint
from ao_core.tensor.saving.header import Form, header_of, names_of, parse_header
from ao_core.tensor.saving.leaves import Record
from ao_core.tensor.saving.shards import checksum, form_crc, places_of, store, write_shard

__all__ = ["DamagedPiece", "Piece", "open_piece", "piece_path", "pieces_of", "write_piece"]

#: bytes of the source that small tensors of one piece have together
SIZE = 32 * 10**6
#: bytes that are copied at a time
_BUFFER = 1 << 23
#: in the metadata of a piece
_REPORT = "ao_report"


class DamagedPiece(CheckpointError):
    """A piece is not what was written; it is removed, so that it is made again."""


def pieces_of(steps: Sequence[Step], blocks: Sequence[str] = ()) -> list[tuple[Step, ...]]:
    """Consecutive tensors of at most 32 MB together, or a larger one alone.

    Tensors of different blocks, which are modules by their names, are in different pieces.
    """
    pieces: list[tuple[Step, ...]] = []
    waiting: list[Step] = []
    room, block = SIZE, ""
    for step in steps:
        own = next((each for each in blocks if step.fqn.startswith(f"{each}.")), "")
        ends, block = own != block, own
        if waiting and (step.entry.nbytes > room or ends):
            pieces.append(tuple(waiting))
            waiting, room = [], SIZE
        waiting.append(step)
        room -= step.entry.nbytes
    return [*pieces, tuple(waiting)] if waiting else pieces


def piece_path(work: Path, number: int) -> Path:
    """The file of a piece."""
    return work / f"piece-{number:05}.safetensors"


def write_piece(
    job: Job,
    steps: Sequence[Step],
    path: Path,
    advance: Advance,
    made: Mapping[str, Converted] | None = None,
    calibration: str = "",
) -> None:
    """Convert some tensors and write them, all or nothing; tells `advance` of each.

    Args:
        job: the job.
        steps: of the tensors.
        path: what is there is replaced.
        advance: is told of each tensor.
        made: by name, tensors that are converted already.
        calibration: how data was run, for the report.

    Raises:
        OSError: it cannot be written.
        AoError: as `convert`.
    """
    leaves: dict[str, Tensor] = {}
    records: dict[str, Record] = {}
    reports = []
    for step in steps:
        advance(step.fqn, 0)
        new = (made or {}).get(step.fqn) or convert(job, step)
        advance(step.fqn, step.entry.nbytes)
        if twice := leaves.keys() & new.leaves.keys():
            raise ConfigError(
                f"two tensors would be stored as {min(twice)!r}; exclude the one that would be quantized"
            )
        leaves |= new.leaves
        reports.append(new.report)
        if new.record is not None:
            records[step.fqn] = new.record
    stored, raw = store(leaves)
    crcs = {name: checksum(leaf) for name, leaf in stored.items()}
    report = {_REPORT: Report({}, tuple(reports), calibration).to_json()}
    unfinished = path.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    write_shard(unfinished, stored, header_of(records, {}, raw, crcs) | report)
    os.replace(unfinished, path)


@dataclass(frozen=True)
class Piece:
    """A piece that is done, to be read byte by byte."""

    path: Path
    #: its tensors in order
    report: Report
    entries: dict[str, Entry]
    #: of the quantized ones
    records: dict[str, Record]
    #: dtype and shape of each leaf as the file holds it, and where its bytes are
    forms: dict[str, Form]
    places: dict[str, tuple[int, int]]
    #: of those that are stored as bytes: what they are
    raw: dict[str, Form]
    crcs: dict[str, str]

    def read(self, leaf: str) -> Iterator[bytes]:
        """The bytes of a leaf, some at a time.

        Raises:
            DamagedPiece: they are not what was written; the piece is removed.
        """
        start, end = self.places[leaf]
        crc = form_crc(self.forms[leaf])
        with self.path.open("rb") as file:
            file.seek(start)
            while start < end:
                data = file.read(min(_BUFFER, end - start))
                if not data:
                    break
                start += len(data)
                crc = zlib.crc32(data, crc)
                yield data
        if start < end or f"{crc:08x}" != self.crcs[leaf]:
            with suppress(OSError):
                self.path.unlink()
            raise DamagedPiece(
                f"{self.path}: the bytes of {leaf!r} changed after they were written, as on a failing "
                "disk; run the same command again to make that file anew"
            )


def open_piece(path: Path) -> Piece:
    """Open a piece.

    Raises:
        CheckpointError: it is damaged.
    """
    checkpoint = open_checkpoint(path)
    tables: dict[str, Table[Any]] = {"dtype": registry.dtypes, "layout": registry.layouts}
    for record in checkpoint.records.values():
        for kind, name in names_of(record):
            if name not in tables[kind]:  # a run that needs what is not here never began
                raise CheckpointError(f"{path}: is not a piece: nobody has the {kind} {name!r}")
    try:
        metadata, table = places_of(path)
        report = Report.from_json(metadata[_REPORT])
    except (SchemaError, ConfigError, KeyError) as error:
        raise CheckpointError(f"{path}: is not a piece: {error!r}") from error
    header = parse_header(metadata)
    records = [record.fqn for record in report]
    if (
        sorted(records) != sorted(checkpoint.entries)
        or header.crcs.keys() != checkpoint.slots.keys()
    ):
        raise CheckpointError(f"{path}: is not a piece: its report has other tensors")
    forms: dict[str, Form] = {}
    for name, slot in checkpoint.slots.items():
        forms[name] = (slot.dtype, slot.shape)
        if name in header.raw:
            forms[name] = (torch.uint8, (slot.nbytes,))
    places = {name: (place.start, place.end) for name, place in table.items()}
    # not the checkpoint, which keeps its file open: there may be thousands of pieces
    return Piece(
        path, report, checkpoint.entries, checkpoint.records, forms, places, header.raw, header.crcs
    )

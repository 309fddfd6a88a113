"""Checkpoints of other projects: the record of a format, and what its functions take and give."""

from __future__ import annotations

from ao_core.checkpoints.files import WORK, copied_files, copy_files
from ao_core.interchange_records import (
    Container,
    ForeignWeight,
    Interchange,
    Reading,
    Source,
    Written,
)
from ao_core.tensor.saving.checkpoint import Entry
from ao_core.tensor.saving.header import header_of
from ao_core.tensor.saving.leaves import flatten
from ao_core.tensor.saving.shards import checksum, file_header, memory_of, store, write_file

__all__ = [
    "WORK",
    "Container",
    "Entry",
    "ForeignWeight",
    "Interchange",
    "Reading",
    "Source",
    "Written",
    "checksum",
    "copied_files",
    "copy_files",
    "file_header",
    "flatten",
    "header_of",
    "memory_of",
    "store",
    "write_file",
]

"""Files: owners of parameters, checkpoints, and texts that are read safely."""

from __future__ import annotations

from ao_core.regular_files import not_a_file, read_text
from ao_core.tensor.described import describe
from ao_core.tensor.saving import Checkpoint, open_files, state_dict_to_flat
from ao_core.tensor.saving.leaves import rebuild
from ao_core.tensor.saving.owners import owners_of
from ao_core.tensor.saving.shards import restore
from ao_core.tensor.saving.write import bytes_of_text

__all__ = [
    "Checkpoint",
    "bytes_of_text",
    "describe",
    "not_a_file",
    "open_files",
    "owners_of",
    "read_text",
    "rebuild",
    "restore",
    "state_dict_to_flat",
]

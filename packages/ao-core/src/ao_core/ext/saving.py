"""Files: owners of parameters, checkpoints, and texts that are read safely."""

from __future__ import annotations

from ao_core.regular_files import not_a_file, read_text
from ao_core.tensor.described import describe
from ao_core.tensor.fsdp import gathered
from ao_core.tensor.saving import (
    Checkpoint,
    flat_to_state_dict,
    open_files,
    state_dict_to_flat,
    write_checkpoint,
)
from ao_core.tensor.saving.leaves import Record, rebuild, record_of, spec_of
from ao_core.tensor.saving.owners import Owner, check_no_extra_state, owners_of
from ao_core.tensor.saving.shards import restore
from ao_core.tensor.saving.state_dicts import untie
from ao_core.tensor.saving.write import bytes_of_text, natural, parse_size

__all__ = [
    "Checkpoint",
    "Owner",
    "Record",
    "bytes_of_text",
    "check_no_extra_state",
    "describe",
    "flat_to_state_dict",
    "gathered",
    "natural",
    "not_a_file",
    "open_files",
    "owners_of",
    "parse_size",
    "read_text",
    "rebuild",
    "record_of",
    "restore",
    "spec_of",
    "state_dict_to_flat",
    "untie",
    "write_checkpoint",
]

"""Files: owners of parameters, checkpoints, and texts that are read safely."""

from __future__ import annotations

from ao_core.regular_files import not_a_file, read_text
from ao_core.tensor.fsdp import gathered
from ao_core.tensor.saving import state_dict_to_flat, write_checkpoint
from ao_core.tensor.saving.owners import Owner, owners_of
from ao_core.tensor.saving.state_dicts import untie
from ao_core.tensor.saving.write import bytes_of_text, natural

__all__ = [
    "Owner",
    "bytes_of_text",
    "gathered",
    "natural",
    "not_a_file",
    "owners_of",
    "read_text",
    "state_dict_to_flat",
    "untie",
    "write_checkpoint",
]

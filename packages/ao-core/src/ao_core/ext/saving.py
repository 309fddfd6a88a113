"""Files: owners of parameters, checkpoints, and texts that are read safely."""

from __future__ import annotations

from ao_core.regular_files import not_a_file, read_text
from ao_core.tensor.saving import flat_to_state_dict, state_dict_to_flat, write_checkpoint
from ao_core.tensor.saving.owners import owners_of
from ao_core.tensor.saving.write import bytes_of_text

__all__ = [
    "bytes_of_text",
    "flat_to_state_dict",
    "not_a_file",
    "owners_of",
    "read_text",
    "state_dict_to_flat",
    "write_checkpoint",
]

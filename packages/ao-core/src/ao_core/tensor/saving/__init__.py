"""Checkpoints: safetensors files with records of what is quantized, saved and loaded without pickle."""

from __future__ import annotations

from ao_core.tensor.saving.checkpoint import Checkpoint, Entry, open_checkpoint, open_files
from ao_core.tensor.saving.header import Provider
from ao_core.tensor.saving.load import Loaded, load_model
from ao_core.tensor.saving.state_dicts import flat_to_state_dict, state_dict_to_flat
from ao_core.tensor.saving.write import save_model, write_checkpoint

__all__ = [
    "Checkpoint",
    "Entry",
    "Loaded",
    "Provider",
    "flat_to_state_dict",
    "load_model",
    "open_checkpoint",
    "open_files",
    "save_model",
    "state_dict_to_flat",
    "write_checkpoint",
]

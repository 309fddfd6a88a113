"""A header may describe a checkpoint whose tensors other programs split among files as they like."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import WeightOnlyConfig, load_model, open_checkpoint, quantize_, verify_checkpoint
from ao_core.errors import CheckpointError
from ao_core.tensor.saving import open_files, state_dict_to_flat


@pytest.fixture
def split(tmp_path):
    """A model, and a folder where the parts of a weight are in two files with one header."""
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    quantize_(model, WeightOnlyConfig("int4", 16))
    flat, metadata = state_dict_to_flat(model.state_dict(), checksums=True)
    names = sorted(flat)
    halves = [names[::2], names[1::2]]
    files = [tmp_path / f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, half in zip(files, halves, strict=True):
        save_file({name: flat[name] for name in half}, file, metadata=metadata)
    return model, tmp_path, files


def test_all_files_together_are_the_model(split):
    model, folder, files = split
    with torch.device("meta"):
        again = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    load_model(again, folder)
    x = torch.randn(3, 32)
    assert torch.equal(again(x), model(x))
    assert open_files(files).entries == open_checkpoint(folder).entries
    assert not any(file.problem for file in verify_checkpoint(folder))


def test_a_file_that_is_lost_is_missed(split):
    _, folder, files = split
    files[1].rename(folder / "elsewhere")
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="at least one"):
        open_files([])
    with pytest.raises(CheckpointError, match="a part of '0.weight', is missing"):
        open_files(files[:1])


def test_headers_must_agree(split):
    model, folder, files = split
    other = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    quantize_(other, WeightOnlyConfig("int8"))
    _, metadata = state_dict_to_flat(other.state_dict())
    stored, _ = state_dict_to_flat(model.state_dict())
    half = sorted(stored)[1::2]
    save_file({name: stored[name] for name in half}, files[1], metadata=metadata)
    with pytest.raises(CheckpointError, match="described differently in another file"):
        open_checkpoint(folder)

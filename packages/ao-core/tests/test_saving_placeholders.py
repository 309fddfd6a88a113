"""Under the name of a quantized tensor is one without elements, at which programs without ao stop."""

from __future__ import annotations

import json
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ao_core import (
    WeightOnlyConfig,
    load_model,
    open_checkpoint,
    quantize_,
    quantize_checkpoint,
    save_model,
)
from ao_core.tensor.saving import flat_to_state_dict, state_dict_to_flat


def model(config=None):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 64, bias=False))
    if config:
        quantize_(layers, config)
    return layers


@pytest.fixture
def quantized():
    return model(WeightOnlyConfig("int4", 32, "bfloat16"))


def save_version_1(state, path):
    """A file as it was before: with parts alone. Returns what it holds."""
    flat, metadata = state_dict_to_flat(state)
    header = json.loads(metadata["ao"])
    for name in header["tensors"]:
        assert not flat.pop(name).numel()
    metadata["ao"] = json.dumps(header | {"version": 1})
    metadata["ao_crc32"] = f"{zlib.crc32(metadata['ao'].encode()):08x}"
    save_file(flat, path, metadata=metadata)
    return flat, metadata


@pytest.mark.parametrize("size", [10**9, 2000])
def test_programs_that_know_nothing_of_parts_refuse(quantized, tmp_path, size):
    save_model(quantized, tmp_path, max_shard_size=size)
    opened = open_checkpoint(tmp_path)
    for name, entry in opened.entries.items():
        assert entry.leaves[0] == name
        assert opened.slots[name].nbytes == (0 if entry.spec else entry.nbytes)
    stored = {name: t for path in opened.files for name, t in load_file(path).items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model().load_state_dict(stored, strict=False)


def test_files_of_version_1_are_read(quantized, tmp_path):
    state = quantized.state_dict()
    flat, metadata = save_version_1(state, tmp_path / "model.safetensors")
    assert flat_to_state_dict(flat, metadata).keys() == state.keys()
    loaded = model()
    load_model(loaded, tmp_path)
    x = torch.ones(2, 64)
    assert torch.equal(loaded(x), quantized(x))


def test_quantized_tensors_of_version_1_are_passed_on_with_one(quantized, tmp_path):
    (tmp_path / "old").mkdir()
    save_version_1(quantized.state_dict(), tmp_path / "old" / "model.safetensors")
    quantize_checkpoint(tmp_path / "old", tmp_path / "new", WeightOnlyConfig("int8"))
    save_model(quantized, tmp_path / "saved")
    files = [tmp_path / folder / "model.safetensors" for folder in ("new", "saved")]
    assert files[0].read_bytes() == files[1].read_bytes()

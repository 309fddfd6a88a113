"""`ao.lock.json` says what a checkpoint follows from, and what differs when it is made again."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import (
    FqnToConfig,
    WeightOnlyConfig,
    dequantize_,
    load_model,
    open_checkpoint,
    quantize_,
    quantize_checkpoint,
    replay_checkpoint,
    save_model,
)
from ao_core.errors import CheckpointError, ConfigError
from ao_core.tensor.saving.hashes import first_difference, tensor_hashes
from ao_core.tensor.saving.lock import read_lock

INT4 = WeightOnlyConfig("int4", 32, "bfloat16")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8, bias=False))


def test_what_save_model_says(tmp_path):
    made = model()
    save_model(made, tmp_path / "dense")
    assert read_lock(tmp_path / "dense").steps == ()
    quantize_(made, INT4)
    save_model(made, tmp_path / "int4")
    lock = read_lock(tmp_path / "int4")
    (step,) = lock.steps
    assert step.config["args"]["dtype"] == "int4"
    assert sum(step.kernels["quantize"].values()) == 2
    assert step.data == ""
    assert lock.versions.keys() >= {"ao-core", "torch"}
    assert lock.tensors.keys() == open_checkpoint(tmp_path / "int4").slots.keys()
    dequantize_(made)
    save_model(made, tmp_path / "again")
    assert read_lock(tmp_path / "again").steps == ()


def test_hashes_are_of_dtype_shape_and_bytes(tmp_path):
    tensors = {
        "a": torch.zeros(4, 2), "b": torch.zeros(2, 4), "c": torch.zeros(8, dtype=torch.int32),
        "d": torch.zeros(4, 2), "empty": torch.zeros(0, 2),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    found = tensor_hashes(open_checkpoint(tmp_path))
    assert found["a"] == found["d"]
    assert len(set(found.values())) == 4
    assert first_difference(found, found) == ""
    assert first_difference(found, found | {"a": "0"}) == "the tensor 'a' has other bytes"
    less = {name: each for name, each in found.items() if name != "b"}
    assert first_difference(found, less) == "the tensor 'b' is missing"
    assert first_difference(less, found) == "the tensor 'b' was not there"


def test_replayed_from_memory_and_from_files(source, tmp_path, in_memory, files):
    """The lock of a model in memory and that of files lead to the same bytes."""
    expected = in_memory(INT4, "5GB")
    quantize_checkpoint(source, tmp_path / "out", INT4, exclude=["layers.3"])
    for name in ("in_memory", "out"):
        result = replay_checkpoint(tmp_path / name, source, tmp_path / f"again-{name}")
        assert (result.first, result.notes) == ("", ())
    assert files(tmp_path / "again-in_memory").items() >= expected.items()
    assert files(tmp_path / "again-out") == files(tmp_path / "out")


def test_several_configurations_in_turn(source, tmp_path, build, files):
    """In memory and in files: both locks lead from the original to the same bytes."""
    first, second = (FqnToConfig({name: INT4}) for name in ("layers.1.q_proj", "layers.2.q_proj"))
    made = build()
    for config in (first, second):
        quantize_(made, config)
    save_model(made, tmp_path / "in_memory")
    quantize_checkpoint(source, tmp_path / "one", first)
    quantize_checkpoint(tmp_path / "one", tmp_path / "two", second)
    for name in ("in_memory", "two"):
        assert len(read_lock(tmp_path / name).steps) == 2
        result = replay_checkpoint(tmp_path / name, source, tmp_path / f"again-{name}")
        assert (result.first, result.notes) == ("", ())
    assert files(tmp_path / "again-two") == files(tmp_path / "two")
    assert not list(tmp_path.glob(".*"))


def test_a_changed_input_is_named_and_nothing_is_written(source, tmp_path, build):
    quantize_checkpoint(source, tmp_path / "out", INT4)
    name = "layers.2.q_proj.weight"
    changed = build()
    load_model(changed, source)
    with torch.no_grad():
        changed.get_parameter(name)[0, 0] += 1
    save_model(changed, tmp_path / "changed")
    result = replay_checkpoint(tmp_path / "out", tmp_path / "changed", tmp_path / "again")
    assert result.first == f"in SRC, the tensor {name!r} has other bytes"
    assert not (tmp_path / "again").exists()


def test_a_result_that_differs_and_versions_are_named(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", INT4)
    lock = json.loads((tmp_path / "out/ao.lock.json").read_text())
    lock["tensors"]["layers.1.q_proj.weight.qdata"] = "0" * 64
    lock["versions"]["torch"] = "1.0"
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    result = replay_checkpoint(tmp_path / "lock.json", source, tmp_path / "again")
    assert result.first == "in DST, the tensor 'layers.1.q_proj.weight.qdata' has other bytes"
    assert result.notes == (f"torch was 1.0, and is {torch.__version__} here",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "is of version 2"),
        ({"tensors": {"a": "0"}}, "SHA-256"),
        ({"steps": 1}, "cannot be read"),
    ],
)
def test_a_lock_that_is_none(change, message, tmp_path):
    save_model(model(), tmp_path)
    lock = json.loads((tmp_path / "ao.lock.json").read_text())
    (tmp_path / "ao.lock.json").write_text(json.dumps(lock | change))
    with pytest.raises(CheckpointError, match=message):
        read_lock(tmp_path)


def test_what_cannot_be_replayed(source, tmp_path):
    save_model(model(), tmp_path / "dense")
    with pytest.raises(ConfigError, match="no quantization led to it"):
        replay_checkpoint(tmp_path / "dense", source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="is missing"):
        replay_checkpoint(tmp_path / "none", source, tmp_path / "out")

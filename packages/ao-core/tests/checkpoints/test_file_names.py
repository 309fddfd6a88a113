"""Files of a result are called as those of its source, whose readers look for these names."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from ao_core import (
    WeightOnlyConfig,
    load_model,
    open_checkpoint,
    quantize_checkpoint,
    verify_checkpoint,
)
from ao_core.checkpoints import run, work
from ao_core.checkpoints.decide import make_job
from ao_core.checkpoints.files import WORK
from ao_core.checkpoints.state import load_state
from ao_core.errors import ConfigError
from ao_core.tensor.saving.names import MODEL, FileNames, names_of_files

INT8 = WeightOnlyConfig("int8")


@pytest.fixture
def other(source, tmp_path):
    """`other(stem)`: the source, as a library writes it that calls its files so."""

    def make(stem):
        folder = tmp_path / f"of {stem}"
        folder.mkdir()
        index = json.loads((source / MODEL.index).read_text())
        names = sorted(set(index["weight_map"].values()))
        new = dict(zip(names, FileNames(stem).shards(len(names)), strict=True))
        for name, renamed in new.items():
            shutil.copy(source / name, folder / renamed)
        index["weight_map"] = {leaf: new[name] for leaf, name in index["weight_map"].items()}
        # as programs do that write the metadata of files there
        index["metadata"] = {"format": "pt", "ao": "{}", "ao_crc32": "0a1b2c3d"}
        (folder / FileNames(stem).index).write_text(json.dumps(index))
        return folder

    return make


@pytest.mark.parametrize("size", [20_000, "5GB"], ids=["shards", "one file"])
def test_names_follow_the_source(source, other, tmp_path, build, size):
    folder = other("diffusion_pytorch_model")
    quantize_checkpoint(folder, tmp_path / "q", INT8, max_shard_size=size)
    called = FileNames("diffusion_pytorch_model")
    found = {file.name for file in (tmp_path / "q").glob("*.safetensors*")}
    assert called.index in found if size == 20_000 else found == {called.single}
    assert all(called.has_tensors(name) or name == called.index for name in found)
    quantize_checkpoint(source, tmp_path / "plain", INT8, max_shard_size=size)
    same, made = (open_checkpoint(tmp_path / name) for name in ("plain", "q"))
    assert made.entries == same.entries
    assert not any(file.problem for file in verify_checkpoint(tmp_path / "q"))
    load_model(build(), tmp_path / "q")
    # replaced at once, from shards to one file and back
    for again in ("5GB", 20_000, 30_000, "5GB"):
        config = {"max_shard_size": again, "overwrite": True}
        quantize_checkpoint(folder, tmp_path / "q", WeightOnlyConfig("int4", 32), **config)
        found = {file.name for file in (tmp_path / "q").glob("*.safetensors*")}
        assert (found == {called.single}) == (again == "5GB")
        opened = open_checkpoint(tmp_path / "q")
        assert opened.entries["layers.0.q_proj.weight"].spec.dtype == "int4"
        assert not any(file.problem for file in verify_checkpoint(tmp_path / "q"))


def test_what_a_folder_has(tmp_path):
    def having(*names):
        shutil.rmtree(tmp_path / "f", ignore_errors=True)
        (tmp_path / "f").mkdir()
        for name in names:
            (tmp_path / "f" / name).touch()
        return names_of_files(tmp_path / "f")

    assert having("a.safetensors", "a.fp16.safetensors") == FileNames("a")
    assert having("a.fp16.safetensors").without_variant() == FileNames("a")
    assert having("a.safetensors", "a-00001-of-00002.safetensors") == FileNames("a")
    assert having("b.safetensors", "model.safetensors") == MODEL
    assert having("a.safetensors.index.json", "a-0a1b2c3d-00001-of-00001.safetensors") == FileNames(
        "a"
    )
    assert having("a-00001-of-00002.safetensors") is None
    assert having("a.safetensors", "b.safetensors") is None
    assert having("a.safetensors", "a-extra.safetensors") is None
    assert having() is None
    assert names_of_files(tmp_path / "nothing") is None


def test_a_variant_is_not_read_with_the_weights(tmp_path):
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "a.fp16.safetensors")
    assert not open_checkpoint(tmp_path).load("weight").any()


def test_a_checkpoint_of_other_names_is_not_replaced(source, other, tmp_path, files):
    quantize_checkpoint(source, tmp_path / "q", INT8)
    before = files(tmp_path / "q")
    with pytest.raises(
        ConfigError, match="files begin with 'model', and those of SRC begin with 'a'"
    ):
        quantize_checkpoint(other("a"), tmp_path / "q", INT8, overwrite=True)
    assert files(tmp_path / "q") == before


def test_a_state_that_names_other_files_is_no_state(source, other, tmp_path, monkeypatch):
    """What a stranger writes there must not decide which files are replaced."""
    folder = other("a")
    monkeypatch.setattr(run, "publish", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize_checkpoint(folder, tmp_path / "q", INT8)
    state = tmp_path / "q" / WORK / "state.json"
    data = json.loads(state.read_text())
    assert data["names"] == ["a.safetensors"]
    state.write_text(json.dumps(data | {"names": ["config.json"]}))
    monkeypatch.undo()
    assert load_state(state.parent).names == ("config.json",)
    assert (
        work._resumed(tmp_path / "q", state.parent, make_job(folder, INT8), data["job"], True)
        is None
    )
    quantize_checkpoint(folder, tmp_path / "q", INT8, overwrite=True)
    assert not (tmp_path / "q" / "config.json").exists()
    assert open_checkpoint(tmp_path / "q").records

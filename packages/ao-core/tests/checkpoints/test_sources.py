"""Sources and targets that cannot work: one clear error, before anything is written."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import ao_core
from ao_core import (
    Config,
    FqnToConfig,
    Spec,
    WeightOnlyConfig,
    int_dtype,
    open_checkpoint,
    quantize_checkpoint,
    quantize_tensor,
)
from ao_core.checkpoints import pieces
from ao_core.checkpoints.files import WORK
from ao_core.errors import AoError, CheckpointError, ConfigError, UnknownNameError
from ao_core.registry import registry
from ao_core.tensor.saving import write_checkpoint

INT4 = WeightOnlyConfig("int4", 32, "bfloat16")
INDEX = "model.safetensors.index.json"


def refused(src, dst, error, match, config=INT4, **options):
    """Nothing is written, and what was there stays as it was."""
    before = {p: p.read_bytes() for p in dst.rglob("*") if p.is_file()} if dst.is_dir() else None
    with pytest.raises(error, match=match) as caught:
        quantize_checkpoint(src, dst, config, **options)
    assert issubclass(error, AoError)
    assert "\n" not in str(caught.value)
    if before is None:
        assert not dst.is_dir()
    else:
        assert {p: p.read_bytes() for p in dst.rglob("*") if p.is_file()} == before


@pytest.fixture
def two(published):
    """Two shards."""
    torch.manual_seed(0)
    return published([{"a.weight": torch.randn(9, 64)}, {"b.weight": torch.randn(9, 64)}])


def rewrite(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


class TestSources:
    def test_none(self, tmp_path):
        refused(tmp_path / "absent", tmp_path / "out", CheckpointError, "no such directory or file")
        (tmp_path / "empty").mkdir()
        refused(tmp_path / "empty", tmp_path / "out", CheckpointError, "no safetensors file")

    def test_a_shard_is_missing(self, two, tmp_path):
        (two / "model-00002-of-00002.safetensors").unlink()
        refused(two, tmp_path / "out", CheckpointError, "00002-of-00002.*which is missing")
        (two / INDEX).unlink()
        refused(two, tmp_path / "out", CheckpointError, "is missing, and so is")

    def test_an_index_that_lies(self, two, tmp_path):
        out = tmp_path / "out"
        rewrite(two, lambda i: i["weight_map"].update({"c.weight": two.name + "-00001-of-2"}))
        refused(two, out, CheckpointError, "which is missing")
        first = "model-00001-of-00002.safetensors"
        rewrite(two, lambda i: i["weight_map"].update({"c.weight": first}))
        refused(two, out, CheckpointError, r"lacks 'c\.weight', which .* lists")
        rewrite(two, lambda i: i["weight_map"].pop("c.weight"))
        rewrite(two, lambda i: i["weight_map"].update({"b.weight": first}))
        refused(two, out, CheckpointError, r"lacks 'b\.weight', which .* lists")
        rewrite(two, lambda i: i["weight_map"].pop("b.weight"))
        quantize_checkpoint(two, out, INT4)  # a file that no index lists is not of the checkpoint
        assert open_checkpoint(out).entries.keys() == {"a.weight"}

    def test_an_index_that_omits_a_tensor(self, published, tmp_path):
        folder = published([{"a.weight": torch.ones(4, 32), "b.weight": torch.ones(4, 32)}])
        rewrite(folder, lambda i: i["weight_map"].pop("b.weight"))
        refused(folder, tmp_path / "out", CheckpointError, r"does not list 'b\.weight'")

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}'])
    def test_an_index_that_is_none(self, two, tmp_path, text):
        (two / INDEX).write_text(text)
        refused(two, tmp_path / "out", CheckpointError, "corrupted, it does not parse")

    @pytest.mark.parametrize("keep", [0, 7, 40, -1])
    def test_a_truncated_shard(self, two, tmp_path, keep):
        file = two / "model-00002-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        refused(two, tmp_path / "out", CheckpointError, "truncated")

    @pytest.mark.parametrize("dtype", ["F4", "F99", "I4"])
    def test_a_dtype_that_is_unknown(self, two, tmp_path, dtype):
        info = {"x.weight": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, 4]}}
        header = json.dumps(info).encode()
        (two / INDEX).unlink()
        for file in two.iterdir():
            file.unlink()
        data = struct.pack("<Q", len(header)) + header + bytes(4)
        (two / "model.safetensors").write_bytes(data)
        refused(two, tmp_path / "out", CheckpointError, "of dtype F4|unknown variant|safetensors")

    def test_pickles(self, tmp_path):
        (tmp_path / "src").mkdir()
        torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "src" / "pytorch_model.bin")
        refused(tmp_path / "src", tmp_path / "out", CheckpointError, "is a pickle")

    def test_a_plugin_that_is_missing(self, tmp_path, monkeypatch):
        with monkeypatch.context() as context:
            context.setitem(registry.dtypes._records, "int3x", int_dtype("int3x", 3))
            context.setitem(registry.dtypes._providers, "int3x", "ao-foreign")
            tensor = quantize_tensor(torch.randn(4, 64), Spec("int3x", (1, 64), layout="packed"))
            write_checkpoint([("w", tensor)], tmp_path / "src")
        refused(tmp_path / "src", tmp_path / "out", CheckpointError, "pip install ao-foreign")

    def test_damaged_bytes(self, source, tmp_path):
        """Found by the checksum when the tensor is read; what was done before it is kept."""
        file = open_checkpoint(source).slots["layers.4.q_proj.weight"].path
        data = bytearray(file.read_bytes())
        position = len(data) - 1
        data[position] ^= 4
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match="corrupted, the checksum of"):
            quantize_checkpoint(source, tmp_path / "out", INT4)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [WORK]


class TestTargets:
    def test_it_exists(self, two, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        quantize_checkpoint(two, out, INT4)  # an empty one is fine
        refused(two, out, ConfigError, r"is not empty \(it has ao\.lock\.json, .*overwrite=True")
        report = quantize_checkpoint(two, out, WeightOnlyConfig("int8"), overwrite=True)
        assert report.coverage == 100
        assert open_checkpoint(out).entries["a.weight"].spec.dtype == "int8"

    def test_files_of_others_are_not_touched(self, two, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        refused(two, out, ConfigError, "is not empty")
        quantize_checkpoint(two, out, INT4, overwrite=True)
        assert (out / "notes.txt").read_text() == "mine"

    def test_it_is_the_source(self, two, tmp_path):
        for src in (two, two / INDEX, two / "model-00001-of-00002.safetensors"):
            refused(src, two, ConfigError, "is where SRC is", overwrite=True)
        refused(two, two / ".." / two.name, ConfigError, "is where SRC is", overwrite=True)
        (tmp_path / "link").symlink_to(two)
        refused(two, tmp_path / "link", ConfigError, "is where SRC is", overwrite=True)

    def test_it_is_inside_the_source(self, two):
        refused(two, two / "int4", ConfigError, "is inside SRC")
        refused(two, two / "a" / "b", ConfigError, "is inside SRC", overwrite=True)
        assert not (two / "int4").exists()

    def test_it_is_a_file(self, two, tmp_path):
        (tmp_path / "file").write_text("")
        refused(two, tmp_path / "file", ConfigError, "is a file")
        refused(two, tmp_path / "file" / "out", CheckpointError, "could not write: Not a directory")

    def test_a_shard_size_that_is_none(self, two, tmp_path):
        refused(two, tmp_path / "out", ConfigError, "max_shard_size='big'", max_shard_size="big")


class TestConfigurations:
    def test_unknown(self, two, tmp_path):
        refused(two, tmp_path / "out", UnknownNameError, "unknown recipe 'int5'", "int5")
        config = WeightOnlyConfig("int99")
        refused(two, tmp_path / "out", UnknownNameError, "unknown dtype 'int99'", config)

    def test_a_name_that_matches_nothing(self, two, tmp_path):
        config = FqnToConfig({"head": INT4, "*": INT4})
        refused(two, tmp_path / "out", ConfigError, "'head' of the FqnToConfig matches no", config)

    def test_one_that_does_not_change_memory(self, two, tmp_path, rowwise_training):
        refused(two, tmp_path / "out", ConfigError, "nothing to write", rowwise_training())

    def test_a_class(self, two, tmp_path):
        refused(two, tmp_path / "out", ConfigError, "call it to make", WeightOnlyConfig)


class Searching(Config):
    """A configuration whose algorithm looks at values."""


def search(dense, config, target):
    scale = float(dense.abs().max()) or 1.0
    return quantize_tensor(dense, Spec("int8", (1, -1)), scale=torch.full((len(dense), 1), scale))


def test_an_algorithm_that_needs_values(tmp_path, monkeypatch):
    ao_core.register(ao_core.Transform(Searching, "searching", 1, search))
    monkeypatch.setattr(pieces, "SIZE", 1000)
    torch.manual_seed(0)
    save_file({"a.weight": torch.randn(6, 32), "b.weight": torch.randn(7, 5)}, tmp_path / "src")
    plan = ao_core.plan_checkpoint(tmp_path / "src", Searching())
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "out", Searching())
    assert [r.bytes_after for r in plan.report] == [r.bytes_after for r in report]
    assert report.bytes_after == 6 * 32 + 6 * 4 + 7 * 5 + 7 * 4

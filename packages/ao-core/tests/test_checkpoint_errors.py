"""A checkpoint that is damaged, incomplete or does not fit: one clear error, and the model untouched."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import TensorSpec, serialize_file
from safetensors.torch import save_file
from torch import nn

from ao_core import WHOLE, Spec, int_dtype, load_model, quantize_tensor, save_model
from ao_core.errors import CheckpointError
from ao_core.registry import IN_PROCESS, registry
from ao_core.tensor.saving import (
    header,
    leaves,
    open_checkpoint,
    state_dict_to_flat,
    write_checkpoint,
)

INT8 = Spec("int8", (1, WHOLE))
NF4 = Spec("nf4", (1, 32), Spec("uint8", (1, WHOLE), zero_point="int"), layout="packed")


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32))


def quantized(seed=0):
    new = model(seed)
    for layer, spec in zip(new, (INT8, NF4), strict=True):
        layer.weight = nn.Parameter(quantize_tensor(layer.weight.detach(), spec), False)
    return new


@pytest.fixture
def one(tmp_path):
    """A checkpoint of one file."""
    save_model(quantized(), tmp_path / "one")
    return tmp_path / "one" / "model.safetensors"


@pytest.fixture
def many(tmp_path):
    """The directory of a checkpoint of several files."""
    save_model(quantized(), tmp_path / "many", max_shard_size=400)
    assert len(list((tmp_path / "many").iterdir())) >= 4
    return tmp_path / "many"


def fails(where, match, target=None, **options):
    """Loading fails with such a message, and the model keeps every tensor object and its values."""
    target = model(seed=1) if target is None else target
    before = {name: (tensor, tensor.clone()) for name, tensor in target.named_parameters()}
    with pytest.raises(CheckpointError, match=match) as caught:
        load_model(target, where, **options)
    for name, tensor in target.named_parameters():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    return str(caught.value)


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


class TestDamage:
    def test_a_flipped_bit_of_a_tensor(self, one):
        flip(one, -5)
        message = fails(one.parent, "corrupted, the checksum")
        assert str(one) in message
        load_model(model(), one.parent, verify=False)

    def test_no_flipped_bit_of_a_file_changes_the_model_silently(self, one):
        """In every fifth byte of the file: an error, or the very same values."""
        whole, rng, harmless = one.read_bytes(), random.Random(0), 0
        wanted = [t.dequantize() if hasattr(t, "spec") else t for t in quantized().parameters()]
        for position in range(0, len(whole), 5):
            flip(one, position, rng.randrange(8))
            target = model(seed=1)
            try:
                load_model(target, one.parent)
            except CheckpointError:
                pass
            else:
                harmless += 1
                found = [t.dequantize() if hasattr(t, "spec") else t for t in target.parameters()]
                assert all(map(torch.equal, wanted, found))
            one.write_bytes(whole)
        assert harmless <= 3  # the entry of the metadata that says what the format is for

    def test_no_flipped_bit_of_an_index_changes_the_model_silently(self, many):
        index, rng = many / "model.safetensors.index.json", random.Random(0)
        whole = index.read_bytes()
        wanted = [t.dequantize() if hasattr(t, "spec") else t for t in quantized().parameters()]
        for position in range(0, len(whole), 5):
            flip(index, position, rng.randrange(8))
            target = model(seed=1)
            try:
                load_model(target, many)
            except CheckpointError:
                pass
            else:
                found = [t.dequantize() if hasattr(t, "spec") else t for t in target.parameters()]
                assert all(map(torch.equal, wanted, found))
            index.write_bytes(whole)

    def test_every_truncation_is_noticed(self, one):
        whole = one.read_bytes()
        for size in [*range(0, len(whole), 97), len(whole) - 1]:
            one.write_bytes(whole[:size])
            fails(one.parent, "truncated|not a safetensors file")

    def test_bytes_too_many(self, one):
        one.write_bytes(one.read_bytes() + b"\0")
        fails(one.parent, "corrupted.*not fully covered")

    def test_a_missing_shard(self, many):
        (many / "model-00002-of-00003.safetensors").unlink()
        fails(many, r"lists model-00002-of-00003\.safetensors, which is missing")

    def test_a_shard_of_another_save(self, many, tmp_path):
        save_model(quantized(seed=5), tmp_path / "other", max_shard_size=400)
        name = "model-00002-of-00003.safetensors"
        (tmp_path / "other" / name).replace(many / name)
        fails(many, f"{name}: is of another checkpoint")

    def test_an_index_that_lists_what_is_absent(self, many):
        index = many / "model.safetensors.index.json"
        data = json.loads(index.read_text())
        data["weight_map"]["5.weight"] = "model-00001-of-00003.safetensors"
        index.write_text(json.dumps(data))
        fails(many, r"00001-of-00003\.safetensors: lacks '5\.weight', which .*index\.json lists")

    def test_an_index_that_omits_what_is_there(self, many):
        index = many / "model.safetensors.index.json"
        data = json.loads(index.read_text())
        del data["weight_map"]["0.bias"]
        index.write_text(json.dumps(data))
        fails(many, r"does not list '0\.bias'")

    def test_an_index_must_not_lead_elsewhere(self, many):
        index = many / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"0.bias": "../one/model.safetensors"}}))
        fails(many, r"index\.json: corrupted, .*not the name of a file in the same folder")

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
    )
    def test_an_index_that_is_none(self, many, text):
        (many / "model.safetensors.index.json").write_text(text)
        fails(many, r"index\.json: corrupted")

    def test_one_tensor_in_two_files(self, many):
        first, second = sorted(many.glob("*.safetensors"))[:2]
        index = many / "model.safetensors.index.json"
        save_file({"0.bias": torch.ones(8)}, first)
        save_file({"0.bias": torch.ones(8)}, second)
        index.write_text(json.dumps({"weight_map": {"0.bias": first.name, "x": second.name}}))
        fails(many, "lacks 'x'")


class TestOtherKinds:
    def test_nothing_there(self, tmp_path):
        fails(tmp_path / "nowhere", "no such directory or file")
        fails(tmp_path, "no safetensors file is here")

    def test_pickles_beside(self, tmp_path):
        torch.save(model().state_dict(), tmp_path / "pytorch_model.bin")
        fails(tmp_path, r"pytorch_model\.bin is a pickle.*convert it to safetensors")
        fails(tmp_path / "pytorch_model.bin", r"pytorch_model\.bin: this is a pickle")

    @pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
    def test_pickles_in_disguise(self, tmp_path, new):
        path = tmp_path / "model.safetensors"
        torch.save(model().state_dict(), path, _use_new_zipfile_serialization=new)
        fails(tmp_path, r"model\.safetensors: this is a pickle")

    def test_one_tensor_in_two_files_without_an_index(self, tmp_path):
        for name in ("a", "b"):
            save_file({"0.bias": torch.ones(8)}, tmp_path / f"{name}.safetensors")
        fails(tmp_path, r"b\.safetensors: '0\.bias' is in a\.safetensors too")
        flat, metadata = state_dict_to_flat({"0.bias": quantize_tensor(torch.ones(1, 8), INT8)})
        save_file(flat, tmp_path / "b.safetensors", metadata=metadata)
        fails(tmp_path, r"b\.safetensors: '0\.bias' is in a\.safetensors too")

    def test_shards_without_an_index(self, many):
        (many / "model.safetensors.index.json").unlink()
        load_model(model(), many)
        (many / "model-00002-of-00003.safetensors").unlink()
        fails(many, r"model-00002-of-00003\.safetensors is missing.*unfinished copy")

    def test_a_dtype_that_is_not_read(self, one):
        data = TensorSpec(dtype="float4_e2m1fn_x2", shape=[0], data_ptr=0, data_len=0)
        serialize_file({"0.bias": data}, one)
        fails(one, r"model\.safetensors: '0\.bias' is of dtype F4")

    def test_a_newer_format(self, one, monkeypatch):
        monkeypatch.setattr(header, "FORMAT_VERSION", 3)
        save_model(quantized(), one.parent)
        monkeypatch.undo()
        message = fails(one.parent, r"format version 3.*reads up to 2\. Upgrade ao-core")
        assert str(one) in message

    def test_a_field_of_a_spec_that_a_newer_release_added(self, one):
        flat, metadata = state_dict_to_flat(quantized().state_dict())
        metadata["ao"] = metadata["ao"].replace(
            '"zero_point":"none"', '"zero_point":"none","shiny":1'
        )
        metadata["ao_crc32"] = f"{zlib.crc32(metadata['ao'].encode()):08x}"
        save_file(flat, one, metadata=metadata)
        fails(one, "malformed.*shiny")


class TestFit:
    def test_names(self, one):
        target = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32, bias=False), nn.LayerNorm(32))
        fails(
            one,
            r"missing in the checkpoint: 2\.weight, 2\.bias\. unknown to the model: 1\.bias",
            target,
        )
        missing, unexpected = load_model(target, one, strict=False)
        assert missing == ("2.weight", "2.bias")
        assert unexpected == ("1.bias",)
        assert target[0].weight.spec == INT8

    def test_shapes(self, one):
        target = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 31))
        wanted = r"1\.weight is \(31, 8\) in the model and \(32, 8\) in the checkpoint; 1\.bias"
        fails(one, wanted, target)
        fails(one, wanted, target, strict=False)

    def test_long_lists_are_cut(self, one):
        target = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
        assert "and 56 more" in fails(one, "missing in the checkpoint", target)

    def test_buffers_that_nobody_fills(self, one):
        target = model().to("meta")
        target.register_buffer("cache", torch.empty(3, device="meta"), persistent=False)
        with pytest.raises(CheckpointError, match=r"since they are buffers.*strict=False\): cache"):
            load_model(target, one)
        assert all(p.is_meta for p in target.parameters())
        load_model(target, one, strict=False)
        assert not any(p.is_meta for p in target.parameters())

    def test_parts_that_do_not_fit_their_record(self, tmp_path, monkeypatch):
        """Checksums do not help against a file made on purpose; kernels must not see its parts."""
        weight = quantize_tensor(torch.randn(8, 32), INT8)
        weight.scale = weight.scale[:3]
        tensors = [("weight", weight), ("bias", torch.zeros(8))]
        wanted = r"weight is not int8.*'scale' is float32 of shape \(3, 1\).*of shape \(8, 1\)"
        with pytest.raises(CheckpointError, match=wanted):  # what could not be loaded is not saved
            write_checkpoint(tensors, tmp_path)
        assert not list(tmp_path.iterdir())
        monkeypatch.setattr(leaves, "check_fit", lambda *args: None)
        write_checkpoint(tensors, tmp_path)
        monkeypatch.undo()
        fails(tmp_path, wanted, nn.Linear(32, 8))


class TestMissingPlugin:
    @pytest.fixture
    def add(self, monkeypatch):
        """Register a number format for the time of saving."""
        monkeypatch.setattr(header, "_version", lambda dist: "0.3" if dist == "ao-foo" else "")
        names = []

        def add(provider):
            registry.add(int_dtype("int3x", bits=3), provider)
            names.append("int3x")

        yield add
        for name in names:
            registry.dtypes._records.pop(name, None)
            registry.dtypes._providers.pop(name, None)

    @pytest.mark.parametrize(
        ("provider", "advice"),
        [
            ("ao-foo", "the dtype 'int3x' of ao-foo 0.3; install it: pip install ao-foo"),
            (IN_PROCESS, "the dtype 'int3x', which was added with ao_core.register"),
        ],
    )
    @pytest.mark.parametrize("where", ["weight", "scale", "activation"])
    def test_the_error_says_what_to_install(self, tmp_path, add, provider, advice, where):
        add(provider)
        third = Spec("int3x", (1, WHOLE))
        spec = {
            "weight": third,
            "scale": Spec("int8", (1, 8), third),
            "activation": replace(INT8, act=third),
        }[where]
        linear = nn.Linear(32, 8)
        weight = quantize_tensor(linear.weight.detach(), spec)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        save_model(linear, tmp_path)
        load_model(nn.Linear(32, 8), tmp_path)
        del registry.dtypes._records["int3x"]
        message = fails(tmp_path, "int3x", nn.Linear(32, 8))
        assert advice in message
        opened = open_checkpoint(tmp_path)
        assert opened.entries["weight"].spec == spec
        assert opened.missing_providers() == [message.partition("needs ")[2]]
        assert torch.equal(opened.read("weight.qdata"), weight.qdata)
        with pytest.raises(CheckpointError, match="int3x"):
            opened.load("weight")
        dense_only = nn.Linear(32, 8)
        del dense_only.weight
        dense_only.register_parameter("weight", None)
        assert load_model(dense_only, tmp_path, strict=False).unexpected == ("weight",)


class TestRefusedBeforeWriting:
    @pytest.mark.parametrize(
        ("tensor", "match"),
        [
            (torch.empty(2, device="meta"), "x has no values"),
            (torch.eye(2).to_sparse(), "x is a torch.sparse_coo tensor"),
        ],
    )
    def test_tensors(self, one, tensor, match):
        before = one.read_bytes()
        bad = model()
        bad.register_buffer("x", tensor)
        with pytest.raises(CheckpointError, match=match):
            save_model(bad, one.parent)
        assert one.read_bytes() == before
        names = {file.name for file in one.parent.iterdir()}
        assert names == {"model.safetensors", "ao.lock.json"}

    def test_lazy_modules(self, tmp_path):
        with pytest.raises(CheckpointError, match="(weight|bias) has no values"):
            save_model(nn.LazyLinear(3), tmp_path)

    def test_extra_state(self, tmp_path):
        class Odd(nn.Linear):
            def get_extra_state(self):
                return {"any": object()}

        with pytest.raises(CheckpointError, match=r"1 \(Odd\) has extra state"):
            save_model(nn.Sequential(nn.ReLU(), Odd(2, 2)), tmp_path)

    def test_two_tensors_of_one_name(self, tmp_path):
        weight = quantize_tensor(torch.randn(4, 4), INT8)
        with pytest.raises(CheckpointError, match=r"stored as 'w\.scale'"):
            write_checkpoint([("w", weight), ("w.scale", torch.ones(1))], tmp_path)

"""Files made to harm: pipes, names outside, headers that lie. One `CheckpointError`, and nothing changes.

`tests/files/hostile.py` of the repository tries thousands at random; here is one of each kind.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import zlib
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ao_core import WHOLE, Spec, load_model, open_checkpoint, quantize_tensor, save_model
from ao_core.errors import CheckpointError
from ao_core.tensor.saving import flat_to_state_dict, state_dict_to_flat
from ao_core.tensor.saving.names import MODEL

UINT4 = Spec("uint4", (1, 16), "bfloat16", zero_point="int", layout="packed")
STATIC = Spec("int8", (1, WHOLE), act=Spec("int8", (WHOLE, WHOLE), zero_point="int", static=True))
SPECS = {
    "int8": Spec("int8", (1, WHOLE)),
    "uint4": UINT4,
    "float": replace(UINT4, zero_point="float"),
    "scaled": replace(UINT4, zero_point="offset", scale_dtype="float16"),
    "nested": Spec("nf4", (1, 16), Spec("uint8", (1, WHOLE), zero_point="int"), layout="packed"),
    "both nested": replace(
        UINT4, zero_point="offset", scale_dtype=Spec("int8", (1, WHOLE), "float16")
    ),
    "mx": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
    "float8": Spec("f8e4m3", (WHOLE, WHOLE), "e4m3"),
    "ternary": Spec("ternary", (1, WHOLE), layout="digits"),
    "flat": Spec("int4", (64,), layout="flat"),
    "dense": Spec("bf16", (1, WHOLE), "none"),
    "static": STATIC,
}


def weight(spec, shape=(24, 64)):
    torch.manual_seed(0)
    act = {"act_scale": 0.1, "act_zero_point": 3} if spec.act is not None else {}
    return quantize_tensor(torch.randn(shape), spec, **act)


def linear():
    torch.manual_seed(1)
    return nn.Linear(64, 24, bias=False)


def refused(where, match, **options):
    """Loading fails with such a message, and the model is as it was."""
    model = linear()
    before, values = model.weight, model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=match) as caught:
        load_model(model, where, **options)
    assert model.weight is before
    assert torch.equal(model.weight, values)
    return str(caught.value)


def save_changed(path, spec, change):
    """A file whose header of ao is changed, and sealed again."""
    flat, metadata = state_dict_to_flat({"weight": weight(spec)})
    header = json.loads(metadata["ao"])
    change(header)
    metadata["ao"] = json.dumps(header)
    metadata["ao_crc32"] = f"{zlib.crc32(metadata['ao'].encode()):08x}"
    save_file(flat, path / "model.safetensors", metadata=metadata)


class TestParts:
    """What every part must be: missing, unknown, of another dtype or size, in every layout."""

    @pytest.mark.parametrize("name", SPECS)
    @pytest.mark.parametrize("shape", [(24, 64), (3, 5), (0, 16), (2, 24, 32)])
    def test_what_is_saved_is_loaded(self, name, shape):
        q = weight(SPECS[name], shape)
        again = flat_to_state_dict(*state_dict_to_flat({"weight": q}))["weight"]
        assert again.spec == q.spec
        assert torch.equal(again.dequantize(), q.dequantize())

    @pytest.mark.parametrize("name", SPECS)
    def test_views_are_saved_and_loaded(self, name):
        q = weight(SPECS[name])
        for view in (q.t(), q.view(-1)):
            again = flat_to_state_dict(*state_dict_to_flat({"weight": view}))["weight"]
            assert torch.equal(again.dequantize(), view.dequantize())

    @pytest.mark.parametrize("name", SPECS)
    def test_each_part_is_looked_at(self, name):
        flat, metadata = state_dict_to_flat({"weight": weight(SPECS[name])})
        others = (torch.int16, torch.float64, torch.bool, torch.uint8, torch.float8_e8m0fnu)
        parts = {name: part for name, part in flat.items() if name != "weight"}
        for part, good in parts.items():
            zeros = [
                torch.zeros(good.shape, dtype=dtype) for dtype in others if dtype != good.dtype
            ]
            fewer = torch.zeros(max(good.numel() - 1, 0), dtype=good.dtype)
            for bad in (*zeros, fewer, good[None], torch.zeros((), dtype=good.dtype)):
                with pytest.raises(CheckpointError, match=part.rpartition(".")[2]):
                    flat_to_state_dict(flat | {part: bad}, metadata)
            with pytest.raises(CheckpointError, match=f"{part}' is missing"):
                flat_to_state_dict({n: t for n, t in flat.items() if n != part}, metadata)

    def test_another_tensor_under_its_name(self, tmp_path):
        flat, metadata = state_dict_to_flat({"weight": weight(SPECS["int8"])})
        for other in (torch.ones(24, 64), torch.zeros(0), torch.zeros(0, 64, dtype=torch.uint8)):
            with pytest.raises(CheckpointError, match="'weight' is there twice"):
                flat_to_state_dict(flat | {"weight": other}, metadata)
            save_file(flat | {"weight": other}, tmp_path / "model.safetensors", metadata=metadata)
            with pytest.raises(CheckpointError, match="'weight' is there twice"):
                open_checkpoint(tmp_path)

    @pytest.mark.parametrize("part", ["zero_point", "spec", "data", "bias", "_bound"])
    def test_a_part_too_many(self, tmp_path, part):
        flat, metadata = state_dict_to_flat({"weight": weight(SPECS["int8"])})
        header = json.loads(metadata["ao"])
        header["tensors"]["weight"]["parts"][part] = None
        metadata["ao"] = json.dumps(header)
        metadata["ao_crc32"] = f"{zlib.crc32(metadata['ao'].encode()):08x}"
        with pytest.raises(CheckpointError, match=part):
            flat_to_state_dict(flat | {f"weight.{part}": torch.ones(24, 1)}, metadata)

    def test_options_switch_nothing_off(self, tmp_path):
        def change(header):
            header["tensors"]["weight"]["spec"]["options"] = [["scale_rule", "bogus"]]
            header["tensors"]["weight"]["shape"] = [24, 128]

        save_changed(tmp_path, SPECS["int8"], change)
        with pytest.raises(CheckpointError, match=r"'qdata' is int8 of shape \(24, 64\)"):
            open_checkpoint(tmp_path).load("weight")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"dtype": "nf4"}, "qdata"),
            ({"dtype": "bf16"}, "scale_dtype='float32' with 'bf16'"),
            ({"scale_dtype": "e8m0"}, "'scale' is float32"),
            ({"scale_dtype": "none"}, "scale_dtype='none' with 'int8'"),
            ({"zero_point": "int"}, "no part 'zero_point'"),
            ({"layout": "int4_cpu"}, "made for a kernel"),
            ({"layout": "nowhere"}, "nowhere"),
            ({"dtype": "int99"}, "int99"),
            ({"block": [1, 7]}, "'scale' is float32 of shape"),
            ({"act": {"dtype": "int99", "block": [1, -1]}}, "int99"),
            ({"act": {"dtype": "nf4", "block": [1, -1], "scale_dtype": "none"}}, "act="),
            ({"act": {"dtype": "int8", "block": [-1, -1], "static": True}}, "no part 'act_scale'"),
        ],
        ids=str,
    )
    def test_a_spec_of_another_tensor(self, tmp_path, change, match):
        save_changed(
            tmp_path,
            SPECS["int8"],
            lambda header: header["tensors"]["weight"]["spec"].update(change),
        )
        message = refused(tmp_path, match)
        assert "weight" in message

    @pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "Tensor", "load"])
    def test_a_logical_dtype(self, tmp_path, dtype):
        save_changed(
            tmp_path, SPECS["int8"], lambda header: header["tensors"]["weight"].update(dtype=dtype)
        )
        refused(tmp_path, f"dtype='?{dtype}")


HEADERS = {
    "crc32": [None, [], "x", {"weight.scale": 3}, {"weight.scale": "xyz"}],
    "ties": [None, [], "x", {"a": 1}, {"a": "nowhere"}, {"weight": "weight"}],
    "raw": [None, [], {"a": []}, {"weight.scale": {"dtype": "float16", "shape": [48]}}],
    "raw ": [{"weight.scale": {"dtype": "int", "shape": [2**70]}}],
    "providers": [None, {}, [3], [{"kind": "dtype"}]],
    "providers ": [[{"kind": "x", "name": "a", "dist": "b", "version": ""}]],
    "version": [None, "1", 1.5, True, 0, -1, [], 2**80],
    "tensors": [None, [], "x", {"weight": 3}, {"weight": {}}],
}  # fmt: skip
RECORDS = {
    "shape": [
        None,
        "64",
        64,
        [1.5, 2],
        ["24", 64],
        [2**70],
        [-1, 64],
        [2**40, 2**40],
        [],
        {},
        [True],
    ],
    "spec": [None, 3, "int8", [], {}],
    "dtype": [None, 3, [], {}, "\ud800"],
    "parts": [None, {}, [], {"qdata": 3}, {"qdata": {}}, {"../x": None}, {"": None}],
    "order": [3, "x", [0], [0, 0], [1, 2], [[]]],
    "flat_from": [3, [], [-1], [2, 2], "x"],
}


class TestHeaders:
    @pytest.mark.parametrize(
        ("field", "value"),
        [(field, value) for field, values in HEADERS.items() for value in values],
        ids=str,
    )
    def test_fields(self, tmp_path, field, value):
        save_changed(tmp_path, UINT4, lambda header: header.update({field.strip(): value}))
        assert str(tmp_path / "model.safetensors") in refused(tmp_path, field.strip().rstrip("s"))

    @pytest.mark.parametrize(
        ("field", "value"),
        [(field, value) for field, values in RECORDS.items() for value in values],
        ids=str,
    )
    def test_fields_of_a_tensor(self, tmp_path, field, value):
        save_changed(
            tmp_path, UINT4, lambda header: header["tensors"]["weight"].update({field: value})
        )
        message = refused(tmp_path, field)
        assert "model.safetensors" in message
        assert "weight" in message

    def test_nesting(self, tmp_path):
        def change(header):
            record = header["tensors"]["weight"]
            deep = record
            for _ in range(100):
                deep = record | {"parts": {"scale": deep}}
            header["tensors"]["weight"] = deep

        save_changed(tmp_path, UINT4, change)
        refused(tmp_path, "nested too deeply")

    def test_a_tie_to_what_is_there(self, tmp_path):
        flat, metadata = state_dict_to_flat({"a": torch.ones(2), "weight": torch.ones(24, 64)})
        header = json.loads(metadata["ao"]) | {"ties": {"weight": "a"}}
        metadata["ao"] = json.dumps(header)
        metadata["ao_crc32"] = f"{zlib.crc32(metadata['ao'].encode()):08x}"
        save_file(flat, tmp_path / "model.safetensors", metadata=metadata)
        refused(tmp_path, "'weight' is tied to 'a', and is there itself")

    @pytest.mark.parametrize(
        "index",
        [
            {"weight_map": {"weight": "/dev/zero"}},
            {"weight_map": {"weight": "../model.safetensors"}},
            {"weight_map": {"weight": ".."}},
            {"weight_map": {"weight": "a\x00b"}},
            {"weight_map": {}, "metadata": {"ao_crc32": {"/dev/zero": "00000000"}}},
            {"weight_map": {}, "metadata": {"ao_crc32": []}},
            {"weight_map": {}, "metadata": 3},
            {"weight_map": [["weight", "x"]]},
        ],
        ids=str,
    )
    def test_indexes(self, tmp_path, index):
        (tmp_path / MODEL.index).write_text(json.dumps(index))
        assert str(tmp_path / MODEL.index) in refused(tmp_path, r"index\.(weight_map|metadata)")


def put_pipe(path):
    os.mkfifo(path)


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the path of a socket must be short
        server.bind(path.name)


KINDS = {
    "a pipe": put_pipe,
    "a socket": put_socket,
    "a directory": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "missing": lambda path: path.symlink_to("nowhere"),
    "cannot be read": lambda path: path.symlink_to(path.name),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="kinds of files of POSIX")
class TestSpecialFiles:
    @pytest.fixture(autouse=True)
    def _back(self, monkeypatch):
        monkeypatch.chdir(os.getcwd())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", ["model.safetensors", "a.safetensors", MODEL.index])
    def test_in_the_place_of_a_file(self, tmp_path, kind, name):
        KINDS[kind](tmp_path / name)
        assert name in refused(tmp_path, kind)
        if kind not in ("a directory", "missing"):
            refused(tmp_path / name, kind)

    @pytest.mark.parametrize("kind", KINDS)
    def test_listed_in_an_index(self, tmp_path, kind):
        KINDS[kind](tmp_path / "part.safetensors")
        (tmp_path / MODEL.index).write_text(
            json.dumps({"weight_map": {"weight": "part.safetensors"}})
        )
        refused(tmp_path, f"lists part.safetensors, which .*{kind}")

    def test_devices_themselves(self):
        refused("/dev/zero", "a device")
        refused("/dev/null", "a device")


class TestReaders:
    def test_while_a_model_is_saved(self, tmp_path):
        """A reader finds the old or the new checkpoint, never an error and never a mix."""
        models = [nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))) for _ in range(2)]
        for number, model in enumerate(models):
            for parameter in model.parameters():
                nn.init.constant_(parameter, number)
        sizes, stop, wrong, reads = (1500, 2500, 10**9), threading.Event(), [], [0]
        save_model(models[0], tmp_path, max_shard_size=1500)

        def read():
            target = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
            while not stop.is_set():
                try:
                    load_model(target, tmp_path)
                    values = {v for p in target.parameters() for v in p.flatten().tolist()}
                    wrong.extend(["a mix"] if len(values) != 1 else [])
                except Exception as error:
                    wrong.append(error)
                reads[0] += 1

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(40):
            save_model(models[number % 2], tmp_path, max_shard_size=sizes[number % 3])
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert reads[0] > 4

    def test_an_error_that_stays_is_told_at_once(self, tmp_path, monkeypatch):
        monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits for nothing"))
        (tmp_path / MODEL.index).write_text("{")
        refused(tmp_path, "corrupted")

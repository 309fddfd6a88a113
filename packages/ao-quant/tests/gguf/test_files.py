"""Reading and writing GGUF files, with the reader and the writer of the `gguf` package as oracles."""

from __future__ import annotations

import os
import struct
import sys

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import ao_core
from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import CheckpointError, ConfigError, MissingExtraError
from ao_quant import GGUFWeightOnlyConfig
from ao_quant.configs import FILE_TYPES
from ao_quant.gguf import read_gguf, read_gguf_header, write_gguf

TYPES = gguf.GGMLQuantizationType
DENSE = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


def _write_theirs(path, alignment=32):
    """A file of the package's own, with tensors of every type and metadata of every kind."""
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in {
        "UINT8": 200, "INT8": -3, "UINT16": 60_000, "INT16": -300, "UINT32": 1 << 31, "INT32": -5,
        "UINT64": 1 << 63, "INT64": -(1 << 40), "FLOAT32": 0.1, "FLOAT64": 0.1, "BOOL": True,
    }.items():  # fmt: skip
        value_type = gguf.GGUFValueType[kind]
        writer.add_key_value(f"one.{kind}", value, value_type)
        writer.add_key_value(f"many.{kind}", [value] * 3, gguf.GGUFValueType.ARRAY, value_type)
    writer.add_string("text", "größer")
    writer.add_array("texts", ["a", "", "ß"])
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for kind in FILE_TYPES:
        size = gguf.GGML_QUANT_SIZES[TYPES[kind.upper()]][1]
        data = random.integers(0, 256, (3, 7, 2 * size), dtype=np.uint8)
        writer.add_tensor(kind, data, raw_dtype=TYPES[kind.upper()])
    for name in ("float32", "float16", "float64", "int8", "int16", "int32", "int64"):
        writer.add_tensor(name, random.integers(-99, 99, (3, 5)).astype(name))
    data = random.integers(0, 256, (2, 3, 14), dtype=np.uint8)
    writer.add_tensor("bfloat16", data, raw_dtype=TYPES.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [32, 128])
def test_a_file_of_the_package_comes_back_byte_for_byte(tmp_path, alignment):
    _write_theirs(tmp_path / "a.gguf", alignment)
    tensors, metadata = read_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", tensors, metadata)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "b.gguf"]


def test_what_is_read(tmp_path):
    _write_theirs(tmp_path / "a.gguf")
    tensors, metadata = read_gguf(tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert list(tensors) == [entry.name for entry in reader.tensors]
    header = read_gguf_header(tmp_path / "a.gguf")
    assert header.quantized
    assert header.metadata.keys() == metadata.keys()
    for entry in reader.tensors:
        shape = tuple(tensors[entry.name].shape)
        assert header.tensors[entry.name] == (entry.tensor_type.name.lower(), shape)
    for entry in reader.tensors:
        tensor = tensors[entry.name]
        assert tuple(tensor.shape) == tuple(entry.shape[::-1].tolist())
        assert isinstance(tensor, QTensor) == (entry.name in FILE_TYPES)
        with np.errstate(all="ignore"):
            known = entry.tensor_type.name not in ("F64", "I8", "I16", "I32", "I64")
            expected = gguf.dequantize(entry.data, entry.tensor_type) if known else entry.data
        actual = tensor.dequantize() if isinstance(tensor, QTensor) else tensor
        assert isinstance(tensor, QTensor) or str(tensor.dtype) == f"torch.{entry.name}"
        actual = actual.float() if actual.dtype == torch.bfloat16 else actual
        assert np.array_equal(actual.numpy(), expected, equal_nan=actual.is_floating_point())
    assert metadata["general.architecture"] == "llama"
    assert metadata["text"] == "größer"
    assert metadata["texts"] == ["a", "", "ß"]
    assert metadata["one.BOOL"] is True
    assert type(metadata["one.INT16"]) is np.int16
    assert metadata["many.UINT64"].dtype == np.uint64
    assert metadata["many.UINT64"].tolist() == [1 << 63] * 3


def test_changing_what_was_read_changes_no_file(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, {"w": torch.ones(4, 8)})
    before = path.read_bytes()
    tensors = read_gguf(path).tensors
    tensors["w"].add_(1)
    assert path.read_bytes() == before
    write_gguf(path, tensors)  # over the file that is mapped
    assert torch.equal(read_gguf(path).tensors["w"], torch.full((4, 8), 2.0))


def test_a_quantized_model(tmp_path):
    """What `quantize_` makes is what the package reads; and back into a model of the same shape."""
    model = nn.Sequential(nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 5)).requires_grad_(False)
    ao_core.quantize_(model[0], GGUFWeightOnlyConfig("q5_k"))
    ao_core.quantize_(model[2], "gguf_weight_only/q4_0")
    seen = []
    write_gguf(
        tmp_path / "a.gguf",
        model.state_dict(),
        {"general.architecture": "mlp"},
        progress=lambda done, total, name: seen.append((done, total, name)),
    )
    assert seen[0] == (0, 4, "0.weight")
    by_name = {entry.name: entry for entry in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert by_name["0.weight"].tensor_type == TYPES.Q5_K
    assert by_name["2.weight"].tensor_type == TYPES.Q4_0
    values = gguf.dequantize(by_name["2.weight"].data, TYPES.Q4_0)
    assert np.array_equal(values, model[2].weight.dequantize().numpy())
    fresh = nn.Sequential(nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 5)).requires_grad_(False)
    fresh.load_state_dict(read_gguf(tmp_path / "a.gguf").tensors, assign=True)
    x = torch.randn(3, 512)
    assert torch.allclose(fresh(x), model(x), rtol=1e-4, atol=1e-5)


def test_any_format_with_the_values_of_a_type_is_written(tmp_path):
    q = quantize_tensor(torch.randn(6, 64), Spec("int4", (32,), "float16", layout="packed"))
    write_gguf(tmp_path / "a.gguf", {"w": q})
    (entry,) = gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert entry.tensor_type == TYPES.Q4_0
    expected = gguf.dequantize(entry.data, entry.tensor_type)
    assert np.array_equal(expected, q.dequantize().numpy())
    again = read_gguf(tmp_path / "a.gguf", dtype=torch.bfloat16).tensors["w"]
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.dequantize(), q.dequantize().bfloat16())


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_dense_tensors(tmp_path, dtype):
    tensors = {
        "matrix": (torch.randn(3, 70) * 9).to(dtype).t(),
        "empty": torch.zeros(0, 4).to(dtype),
        "parameter": nn.Parameter(torch.ones(5).to(dtype), requires_grad=False),
    }
    write_gguf(tmp_path / "a.gguf", tensors)
    again, metadata = read_gguf(tmp_path / "a.gguf")
    assert metadata == {}
    for name, tensor in tensors.items():
        assert again[name].dtype == dtype
        assert torch.equal(again[name], tensor)


def test_types_of_plain_metadata(tmp_path):
    metadata = {
        "small": 7, "negative": -7, "large": 1 << 40, "larger": 1 << 63, "real": 0.5, "yes": True,
        "integers": [1, -1], "wide": [1, 1 << 40], "reals": (0.5, 1.0), "no": [False], "empty": "",
    }  # fmt: skip
    write_gguf(tmp_path / "a.gguf", {}, metadata)
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    kinds = {key: fields[key].types[-1].name for key in metadata}
    assert kinds == {
        "small": "UINT32", "negative": "INT32", "large": "INT64", "larger": "UINT64",
        "real": "FLOAT32", "yes": "BOOL", "integers": "INT32", "wide": "INT64",
        "reals": "FLOAT32", "no": "BOOL", "empty": "STRING",
    }  # fmt: skip
    again = read_gguf(tmp_path / "a.gguf").metadata
    assert again.pop("empty") == ""
    assert again["wide"].tolist() == [1, 1 << 40]


# -- what cannot be ---------------------------------------------------------------------------------


def _quantized(kind, *shape):
    layer = nn.Linear(shape[1], shape[0], bias=False)
    ao_core.quantize_(layer, GGUFWeightOnlyConfig(kind))
    return layer.weight


BAD = {
    "rows": (lambda: _quantized("q4_k", 8, 300), "rows of 300.* 256 or 512 would do"),
    "short rows": (lambda: _quantized("q4_0", 8, 20), "rows of 20.*: 32 would do"),
    "format": (
        lambda: quantize_tensor(torch.ones(8, 64), Spec("int8", (1, 64))),
        "q4_0.*dequantize",
    ),
    "transposed": (lambda: _quantized("q8_0", 64, 64).t(), "transposed"),
    "dtype": (lambda: torch.ones(3, dtype=torch.bool), "torch.bool; .*bfloat16"),
    "dimensions": (lambda: torch.ones(1, 1, 1, 1, 1), "has 5 dimensions; .* have 1 to 4"),
    "scalar": (lambda: torch.ones(()), "has 0 dimensions; .* have 1 to 4"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device"),
}


@pytest.mark.parametrize("what", BAD)
def test_tensors_that_gguf_cannot_hold(tmp_path, what):
    make, message = BAD[what]
    (tmp_path / "a.gguf").write_bytes(b"old")
    with pytest.raises(CheckpointError, match=f"(?s)^layer .*{message}"):
        write_gguf(tmp_path / "a.gguf", {"norm": torch.ones(3), "layer": make()})
    assert (tmp_path / "a.gguf").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.gguf"]


def test_names_that_ggml_cannot_read(tmp_path):
    write_gguf(tmp_path / "a.gguf", {"x" * 63: torch.ones(1)})
    with pytest.raises(CheckpointError, match="has 64 bytes; names in GGUF have 1 to 63"):
        write_gguf(tmp_path / "a.gguf", {"x" * 64: torch.ones(1)})


@pytest.mark.parametrize(
    "value", [None, [], [1, "a"], [[1]], {}, 1 << 64, np.ones((2, 2)), np.array(5), 1j]
)
def test_metadata_that_gguf_cannot_hold(tmp_path, value):
    with pytest.raises(ConfigError, match=r"metadata\['key'\]="):
        write_gguf(tmp_path / "a.gguf", {}, {"key": value})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("alignment", [48, 4, 0, "32", -32, np.int64(32)])
def test_alignments_that_gguf_does_not_have(tmp_path, alignment):
    with pytest.raises(ConfigError, match="power of two"):
        write_gguf(tmp_path / "a.gguf", {}, {"general.alignment": alignment})
    assert not os.listdir(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    write_gguf(path, {"w": torch.ones(3)})
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match="No space"):
        write_gguf(path, {"w": torch.zeros(3)})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.gguf"]


def test_damaged_files(tmp_path):
    path = tmp_path / "a.gguf"
    _write_theirs(path)
    whole = path.read_bytes()
    for cut in (0, 3, 10, 100, 2000, len(whole) - 1000):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"a\.gguf is not a GGUF file, or it is damaged"):
            read_gguf(path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(CheckpointError, match="magic"):
        read_gguf(path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_gguf(tmp_path / "none.gguf")


def test_headers_that_contradict_themselves(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, {"one": torch.ones(64), "two": torch.ones(64)}, {"key": 1, "yek": 2})
    whole = path.read_bytes()
    two = whole.index(b"two")
    shape, kind, start = two + 7, two + 15, two + 19
    for at, new, message in (
        (two, b"one", "two tensors have the same name"),
        (whole.index(b"yek"), b"key", "'key' is there twice"),
        (4, struct.pack("<I", 9), "version 9"),
        (shape, struct.pack("<QI", 63, int(TYPES.Q8_0)), "rows of 'two' have 63"),
        (kind, struct.pack("<I", 99), "the type 99"),
        (start, struct.pack("<Q", 8), "multiple of 32"),
        (start, struct.pack("<Q", 1 << 20), "'two' ends behind"),
    ):
        path.write_bytes(whole[:at] + new + whole[at + len(new) :])
        with pytest.raises(CheckpointError, match=message):
            read_gguf(path)


def test_types_that_are_not_supported(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    size = gguf.GGML_QUANT_SIZES[TYPES.IQ2_XXS][1]
    writer.add_tensor("blk.0.w", np.zeros((2, size), np.uint8), raw_dtype=TYPES.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"'blk\.0\.w' has the type IQ2_XXS.*F32, .*IQ4_NL"):
        read_gguf(tmp_path / "a.gguf")


def test_big_endian_files(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("w", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="little-endian"):
        read_gguf(tmp_path / "a.gguf")


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for call in (
        lambda: read_gguf(tmp_path / "a.gguf"),
        lambda: write_gguf(tmp_path / "a.gguf", {}),
    ):
        with pytest.raises(MissingExtraError, match=r'pip install "ao-quant\[gguf\]"'):
            call()

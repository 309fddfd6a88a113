"""ONNX files: initializers as tensors, read from where they are, and a file with a node for each weight."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core.ext import CheckpointError, MissingExtraError
from ao_core.ext.interchange import Container, Source, memory_of, write_file
from ao_core.ext.saving import not_a_file

__all__ = ["CONTAINER"]

#: number of ONNX -> dtype
_DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16, 17: torch.float8_e4m3fn,
    19: torch.float8_e5m2,
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_DOMAIN, _OP, _ALIGNED = "com.microsoft", "MatMulNBits", 64
_INPUTS = ("codes", "scales", "zero_points", "g_idx")


def _package() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError(
            "onnx", "ao-quant[onnx]", "Reading and writing ONNX files"
        ) from error
    return onnx


def _nodes(graph: Any) -> Iterator[dict[str, Any]]:
    """What each node MatMulNBits says."""
    for node in graph.node:
        if node.op_type == _OP and len(node.input) >= 3:
            numbers = {a.name: int(a.i) for a in node.attribute if a.type == 2}
            told = dict(zip(_INPUTS, node.input[1:5], strict=False))
            keys = ("K", "N", "bits", "block_size")
            defaults = {"bits": 4, "block_size": 0, "K": 0, "N": 0}
            yield told | {key: max(numbers.get(key, defaults[key]), 0) for key in keys}


def _bytes(path: Path, tensor: Any, size: int) -> bytes:
    """The bytes of an initializer, from the file itself or from its external data.

    Raises:
        CheckpointError: there are others than its form needs, or they are outside of the folder.
    """
    data = tensor.raw_data
    if tensor.data_location == 1:
        told = {entry.key: entry.value for entry in tensor.external_data}
        if any(isinstance(text, bytes) for pair in told.items() for text in pair):
            raise CheckpointError(f"{path}: where {tensor.name!r} is, is not a text in UTF-8")
        file = path.parent / told.get("location", "")
        start, length = told.get("offset", "0"), told.get("length", str(size))
        inside = file.resolve().parent == path.parent.resolve()
        if not inside or not (start.isdecimal() and length.isdecimal()) or int(length) != size:
            raise CheckpointError(f"{path}: {tensor.name!r} is at {told}, and needs {size} bytes")
        if reason := not_a_file(file):
            raise CheckpointError(f"{file}: {reason}")
        with file.open("rb") as beside:
            beside.seek(min(int(start), file.stat().st_size))
            data = beside.read(size)
    if len(data) != size:
        raise CheckpointError(f"{path}: {tensor.name!r} has {len(data)} bytes, and needs {size}")
    return bytes(data)


def _open(path: Path) -> Source:
    onnx = _package()
    if reason := not_a_file(path):
        raise CheckpointError(f"{path}: {reason}")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # of protobuf, which has several kinds
        raise CheckpointError(f"{path} is not an ONNX file, or it is damaged: {error}") from error
    held = {each.name: each for each in model.graph.initializer}
    forms = {}
    for name, each in held.items():
        dtype, shape = _DTYPES.get(each.data_type), tuple(each.dims)
        if dtype is None or any(size < 0 for size in shape):
            raise CheckpointError(
                f"{path}: {name!r} has the type {each.data_type} and shape {shape}"
            )
        forms[name] = (dtype, shape)

    def take(name: str) -> Tensor:
        dtype, shape = forms[name]
        data = _bytes(path, held[name], prod(shape) * dtype.itemsize)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return flat.view(dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)

    try:
        named = [*held, *(name for node in model.graph.node for name in node.input)]
        # protobuf gives bytes for what is not UTF-8
        if any(isinstance(name, bytes) for name in named):
            raise CheckpointError(f"{path} is damaged: a name is not a text in UTF-8")
        metadata = {"nodes": json.dumps(list(_nodes(model.graph)))}
        config = {e.key: e.value for e in model.metadata_props}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return Source(forms, take, {"dtype": config.get("dtype", "float16")}, {}, metadata)


def _write(
    path: Path, source: Source, settings: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    """Write a file whose tensors are external data in a second file, so that no size is too large."""
    helper, onnx = _package().helper, _package()
    beside = path.with_name(path.name + ".data")
    initializers, places, at = [], [], 0
    for name, (dtype, shape) in source.forms.items():
        if dtype not in _NUMBERS:
            raise CheckpointError(f"{name} is {dtype}, which ONNX has no initializer of")
        size = prod(shape) * dtype.itemsize
        at = -(-at // _ALIGNED) * _ALIGNED
        tensor = onnx.TensorProto(name=name, data_type=_NUMBERS[dtype], dims=shape, data_location=1)
        told = {"location": beside.name, "offset": str(at), "length": str(size)}
        for key, value in told.items():
            tensor.external_data.add(key=key, value=value)
        initializers.append(tensor)
        places.append((name, at))
        at += size
    nodes, inputs, outputs = [], [], []
    for name, used in settings.items():
        owner = name.removesuffix(".weight")
        given = [f"{owner}.input", used["codes"], used["scales"], used.get("zero_points") or ""]
        given = given if given[-1] else given[:-1]
        numbers = {key: used[key] for key in ("K", "N", "bits", "block_size")}
        nodes.append(
            helper.make_node(_OP, given, [f"{owner}.output"], owner, domain=_DOMAIN, **numbers)
        )
        kind = _NUMBERS[source.forms[used["scales"]][0]]
        inputs.append(helper.make_tensor_value_info(given[0], kind, ["rows", used["K"]]))
        outputs.append(helper.make_tensor_value_info(f"{owner}.output", kind, ["rows", used["N"]]))
    graph = helper.make_graph(nodes, "ao", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model.metadata_props.add(key="dtype", value=str(source.dtype).removeprefix("torch."))

    def buffers() -> Iterator[Any]:
        written = 0
        for name, start in places:
            tensor = source.take(name).contiguous()
            yield bytes(start - written)
            yield memory_of(tensor)
            written = start + tensor.nbytes

    for file, data in ((beside, buffers()), (path, iter([model.SerializeToString()]))):
        unfinished = file.with_name(f".{file.name}.unfinished")
        unfinished.unlink(missing_ok=True)
        write_file(unfinished, data)
        os.replace(unfinished, file)


def _unpack(path: Path, place: Path) -> tuple[str, ...]:
    return ("ONNX files have no config.json and no tokenizer; take those of the original model",)


CONTAINER = Container(".onnx", _open, _write, _unpack)

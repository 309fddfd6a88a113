"""GGUF: blocks of ggml, in files with names, rows, metadata and a tokenizer of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor, quantize_tensor
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_core.ext.schema import TEXT, SchemaError, Table, check, parse_json
from ao_quant.configs.gguf import FILE_TYPES, gguf_spec
from ao_quant.gguf.blocks import block_size, from_blocks, kind_of, to_blocks
from ao_quant.interchange.gguf_files import CONTAINER
from ao_quant.interchange.integers import (
    Integers,
    assemble,
    integers_of,
    offsets_of,
    rows_of,
    tensor_of,
)
from ao_quant.interchange.naming import unlabelled

__all__ = ["GGUF"]

#: the types of integers in blocks of 32, by bits: symmetric, with a minimum
_SYMMETRIC, _MINIMA = {4: "q4_0", 5: "q5_0", 8: "q8_0"}, {4: "q4_1", 5: "q5_1"}


def _types(source: Source) -> dict[str, str]:
    """The type of each weight in blocks."""
    try:
        found: dict[str, str] = parse_json(source.metadata.get("types", "{}").encode())
        check(found, Table(TEXT), "types")
    except SchemaError as error:
        raise CheckpointError(f"GGUF: {error}") from error
    return found


def _make(source: Source, name: str, kind: str) -> QTensor:
    _, size = block_size(kind)
    data = source.take(name)
    if data.dtype != torch.uint8 or not data.dim() or data.shape[-1] % size:
        raise CheckpointError(f"{name} is {data.dtype} {list(data.shape)}, and no blocks of {kind}")
    return from_blocks(data, kind, source.dtype)


def _read(source: Source) -> Reading:
    weights = {}
    for name, kind in _types(source).items():
        if kind not in FILE_TYPES or name not in source.forms:
            raise CheckpointError(f"{name} is missing, or its type {kind!r} is not read")
        make = partial(_make, source, name, kind)
        weights[name] = ForeignWeight((name,), make, {"type": kind})
    return Reading(weights)


def _in_blocks(found: Integers) -> QTensor | None:
    """Integers with one scale for each 32 columns, in the type that has their values; None: there is none."""
    columns, middle = found.codes.shape[1], 1 << (found.bits - 1)
    group = min(found.group, columns)
    half = found.scale.half()
    exact = bool((half.float() == found.scale.float()).all()) and found.perm is None
    if not exact or columns % 32 or group % 32 or found.bits == 1:
        return None
    bits = next((b for b in (4, 5, 8) if b >= found.bits), None)
    times = group // 32
    scale = half.repeat_interleave(times, 1)[:, : columns // 32].contiguous()
    zero = found.zeros.repeat_interleave(times, 1)[:, : columns // 32].contiguous()
    if bits is None or not bool((zero == middle).all()):
        return None
    codes = found.codes + ((1 << (bits - 1)) - middle)
    made = tensor_of(Integers(codes, bits, 32, scale), torch.float16)
    return made if made.spec == gguf_spec(_SYMMETRIC[bits]) else None


def _with_minima(tensor: QTensor) -> QTensor | None:
    """The codes of a matrix in q4_1 or q5_1, whose minima are rounded once; None: there is no such type."""
    found = offsets_of(tensor)
    if found is None or found.bits > 5 or found.group % 32 or tensor.shape[1] % 32:
        return None
    half = found.scale.half()
    if not bool((half.float() == found.scale.float()).all()):
        return None
    kind, times = _MINIMA[max(found.bits, 4)], min(found.group, tensor.shape[1]) // 32
    blocks = tensor.shape[1] // 32
    scale, offset = (
        each.repeat_interleave(times, 1)[:, :blocks].contiguous()
        for each in (half, found.offset.half())
    )
    if not bool(offset.isfinite().all()):
        return None
    return assemble(found.codes, gguf_spec(kind), tuple(tensor.shape), tensor.dtype, scale, offset)


def _near(tensor: QTensor) -> str:
    """The type that a weight is put on where none has its values."""
    bits = tensor.format.bits
    minima = tensor.spec.zero_point != "none"
    return (
        "q8_0"
        if bits > 5
        else ("q5_1" if bits == 5 else "q4_1")
        if minima
        else _SYMMETRIC[max(bits, 4)]
    )


def _typed(tensor: QTensor, settings: Mapping[str, Any]) -> tuple[str, QTensor]:
    """The type for a weight, and the weight in it."""
    base = rows_of(tensor)
    if base.spec.input:
        raise QuantizationError(
            f"{tensor.spec} has steps on its inputs, which GGUF has no place for"
        )
    if (kind := settings.get("type") or kind_of(base)) is not None and kind_of(base) == kind:
        return kind, base
    found = integers_of(base) if base.dim() == 2 else None
    blocks = None if found is None else _in_blocks(found)
    if blocks is not None:
        return str(kind_of(blocks)), blocks
    if (found_offsets := _with_minima(base)) is not None:
        return str(kind_of(found_offsets)), found_offsets
    near = _near(base)
    dense: Tensor = base.dequantize(torch.float32)
    if dense.shape[-1] % 32:
        raise QuantizationError(f"rows of {dense.shape[-1]} are no whole blocks of 32")
    spec = gguf_spec(near)
    spec = replace(spec, block=(1,) * (dense.dim() - 2) + spec.block) if dense.dim() > 2 else spec
    return near, quantize_tensor(dense, spec)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    kind, made = _typed(tensor, settings)
    if made.shape[-1] % block_size(kind)[0]:
        raise QuantizationError(
            f"rows of {made.shape[-1]} are no whole blocks of {block_size(kind)[0]}, which {kind} has"
        )
    return Written({name: to_blocks(made, kind).contiguous()}, {"type": kind})


def _metadata(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {"types": json.dumps({name: used["type"] for name, used in settings.items()})}


def _detect(source: Source) -> str:
    found = _types(source)
    return f"{len(found)} tensors in blocks of ggml" if found else ""


GGUF = Interchange(
    "gguf",
    _detect,
    _read,
    _write,
    unlabelled,
    "GGUF of llama.cpp: Llama, Qwen 2 and 3, Gemma, Mistral, Mixtral, with the tokenizer",
    _metadata,
    CONTAINER,
)

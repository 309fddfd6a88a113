"""ONNX files with MatMulNBits: the initializers of each such node are a weight, and back.

Codes are the little-endian bit stream of a row, cut into blocks; zero points are packed by rows, or are
numbers; where there are none, they are 2**(bits - 1). The rest of the graph is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_core.ext.schema import COUNT, TEXT, Fields, Items, Optional, SchemaError, check, parse_json
from ao_quant.interchange.integers import SCALES, Integers, assemble, integers_on, tensor_of
from ao_quant.interchange.naming import check_form, unlabelled
from ao_quant.interchange.onnx_files import CONTAINER
from ao_quant.interchange.words import pack_words, unpack_words

__all__ = ["ONNX"]

_BITS, _SIZES = (4, 2, 8), (128, 64, 32, 256, 16)
#: what tools append to the name of a weight for its codes
_SUFFIX = re.compile(r"(_Q\d\w*|_quantized|_packed)$|\.qweight$")
_NODES = Items(
    Fields(
        {"codes": TEXT, "scales": TEXT, "K": COUNT, "N": COUNT, "bits": COUNT, "block_size": COUNT},
        {"zero_points": Optional(TEXT), "g_idx": Optional(TEXT)},
    )
)


def _nodes(source: Source) -> dict[str, dict[str, Any]]:
    """What each node says, by the name of the weight."""
    try:
        found = parse_json(source.metadata.get("nodes", "[]").encode())
        check(found, _NODES, "nodes")
    except SchemaError as error:
        raise CheckpointError(f"MatMulNBits: {error}") from error
    named = {}
    for node in found:
        name = _SUFFIX.sub("", node["codes"])
        named[name if name.endswith(".weight") else f"{name}.weight"] = node
    return named


def _zeros(source: Source, node: Mapping[str, Any], blocks: int) -> Tensor | None:
    """Zero points (N, blocks); None: there are none."""
    name = node.get("zero_points")
    if not name:
        return None
    if name not in source.forms:
        raise CheckpointError(f"{name} is missing")
    n, bits, zero = node["N"], node["bits"], source.take(name)
    if zero.dtype == torch.uint8:
        if zero.numel() != n * -(-blocks * bits // 8):
            raise CheckpointError(
                f"{name} has {zero.numel()} bytes for {n} rows of {blocks} blocks"
            )
        return unpack_words(zero.reshape(n, -1), bits, blocks).to(torch.int16)
    if zero.numel() != n * blocks or zero.dtype not in SCALES.values():
        raise CheckpointError(f"{name} is {zero.dtype} {list(zero.shape)} for {[n, blocks]} blocks")
    return zero.reshape(n, blocks)


def _make(source: Source, node: Mapping[str, Any]) -> QTensor:
    n, k, bits, size = (node[key] for key in ("N", "K", "bits", "block_size"))
    if bits not in _BITS or size < 16 or size & (size - 1) or min(n, k) < 1:
        raise CheckpointError(f"{node['codes']}: bits={bits}, block_size={size}, K={k}, N={n}")
    blocks = -(-k // size)
    check_form(source, node["codes"], (torch.uint8,), source.forms.get(node["codes"], (0, ()))[1])
    codes, scales = source.take(node["codes"]), node["scales"]
    if codes.numel() != n * blocks * size * bits // 8:
        raise CheckpointError(f"{node['codes']} {list(codes.shape)} does not fit {[n, k]} codes")
    check_form(source, scales, tuple(SCALES.values()), source.forms.get(scales, (0, ()))[1])
    scale = source.take(scales)
    if scale.numel() != n * blocks:
        raise CheckpointError(f"{scales} {list(scale.shape)} does not fit {[n, blocks]} blocks")
    whole = unpack_words(codes.reshape(n, -1), bits, blocks * size)[:, :k].contiguous()
    scale, zero = scale.reshape(n, blocks), _zeros(source, node, blocks)
    if zero is None or zero.dtype == torch.int16:
        return tensor_of(Integers(whole, bits, min(size, k), scale, zero), source.dtype)
    held = str(scale.dtype).removeprefix("torch.")
    layout = "plain" if bits == 8 else "packed"
    spec = Spec(f"uint{bits}", (1, size), held, "float", layout)
    return assemble(whole, spec, (n, k), source.dtype, scale, zero.to(scale.dtype))


def _read(source: Source) -> Reading:
    weights, refused = {}, {}
    for name, node in _nodes(source).items():
        parts = [node.get(key) for key in ("codes", "scales", "zero_points", "g_idx")]
        if node.get("g_idx"):
            refused[name] = "g_idx orders columns, which is deprecated and not read"
            continue
        names = tuple(part for part in parts if part)
        weights[name] = ForeignWeight(names, partial(_make, source, node), dict(node))
    return Reading(weights, refused)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    scales = tuple(SCALES.values())
    found = integers_on(tensor, _BITS, scale=scales, whole=False, groups=_SIZES)
    (n, k), bits, size = found.codes.shape, found.bits, found.group
    blocks = -(-k // size)
    if found.scale.shape[1] != blocks:
        raise QuantizationError(f"groups of {size} do not fit rows of {k}")
    middle = 1 << (bits - 1)
    padded = F.pad(found.codes, (0, blocks * size - k), value=middle)
    names = {
        "codes": settings.get("codes", f"{name}_Q{bits}"),
        "scales": settings.get("scales", f"{name}_scales"),
    }
    tensors = {
        names["codes"]: pack_words(padded, bits, torch.uint8).view(n, blocks, size * bits // 8),
        names["scales"]: found.scale,
    }
    if found.zero is not None:
        names["zero_points"] = settings.get("zero_points") or f"{name}_zero_points"
        tensors[names["zero_points"]] = pack_words(found.zero.to(torch.uint8), bits, torch.uint8)
    used = {**names, "K": k, "N": n, "bits": bits, "block_size": size}
    return Written(tensors, used)


def _metadata(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {"nodes": json.dumps([dict(used) for used in settings.values()])}


def _detect(source: Source) -> str:
    found = _nodes(source)
    return f"{len(found)} nodes MatMulNBits" if found else ""


ONNX = Interchange(
    "onnx",
    _detect,
    _read,
    _write,
    unlabelled,
    "ONNX: the initializers of MatMulNBits, 2, 4 and 8 bits in blocks of 16 to 256",
    _metadata,
    CONTAINER,
)

"""compressed-tensors, as vLLM and LLM Compressor write it: integers, floats, and microscaling formats.

Integers are packed along the inputs as q + 2**(bits - 1), also where they are signed; zero points along the
outputs. Files of before the dense packing hold 32 // bits codes in a word: the width tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext import CheckpointError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source
from ao_quant.interchange import compressed_write, floats
from ao_quant.interchange.gptq import order_of
from ao_quant.interchange.integers import Integers, tensor_of
from ao_quant.interchange.naming import check_form, modules_with
from ao_quant.interchange.scales import Scales, mended
from ao_quant.interchange.words import unpack_padded, unpack_words, words

__all__ = ["COMPRESSED", "read_compressed"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _groups(source: Source) -> list[tuple[Mapping[str, Any], list[str]]]:
    """What the label says of weights: (arguments, targets) of each group."""
    groups = source.quantization.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError("quantization_config: config_groups must be an object")
    found = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if weights is not None and not isinstance(weights, Mapping):
            raise CheckpointError(f"quantization_config: weights of {name} must be an object")
        if targets is not None and not isinstance(targets, list):
            raise CheckpointError(f"quantization_config: targets of {name} must be a list")
        if weights:
            found.append((weights, [t for t in targets or () if isinstance(t, str)]))
    return found


def arguments_of(source: Source, name: str) -> Mapping[str, Any]:
    """What the label says of the weight of a module; empty where it says nothing."""
    groups, by_class = _groups(source), None
    for arguments, targets in groups:
        for target in targets:
            pattern = target.removeprefix("re:")
            if target == name or (pattern != target and _matches(pattern, name)):
                return arguments
            if target == "Linear" and by_class is None:
                by_class = arguments
    return by_class if by_class is not None else groups[0][0] if len(groups) == 1 else {}


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: target {pattern!r}: {error}") from error


def _packed_as(width: int, columns: int, name: str, label: object) -> tuple[int, bool]:
    """(bits, padded) of words of a row.

    Raises:
        CheckpointError: nothing fits, or more than one thing does, and the label does not tell.
    """
    dense = [b for b in range(1, 9) if words(columns, b) == width]
    padded = [b for b in (3, 5, 6, 7) if -(-columns // (32 // b)) == width]
    if label in dense:
        return int(str(label)), False
    if label in padded:
        return int(str(label)), True
    raise CheckpointError(
        f"{name}: {width} words for {columns} inputs are of no packing of {label!r} bits, which the label has"
    )


def _packed(source: Source, name: str) -> QTensor:
    (n, width), scale = (source.forms[f"{name}.{p}"][1] for p in ("weight_packed", "weight_scale"))
    check_form(source, f"{name}.weight_shape", (torch.int64, torch.int32), (2,))
    rows, columns = source.take(f"{name}.weight_shape").tolist()
    if rows != n or not 0 < columns <= 32 * width or scale not in ((n, *scale[1:]), (1,)):
        raise CheckpointError(f"{name}: weight_shape={[rows, columns]} with {[n, width]} words")
    check_form(source, f"{name}.weight_scale", _FLOATS, scale)
    arguments = arguments_of(source, name)
    bits, padded = _packed_as(width, columns, name, arguments.get("num_bits"))
    unpack = unpack_padded if padded else unpack_words
    codes = unpack(source.take(f"{name}.weight_packed"), bits, columns)
    of_group = source.take(f"{name}.weight_scale").reshape(-1, scale[-1])
    if of_group.shape[0] != n:
        of_group = of_group.expand(n, 1).contiguous()
    groups = of_group.shape[1]
    label = arguments.get("group_size")
    group = label if type(label) is int and label > 0 else -(-columns // groups)
    if -(-columns // group) != groups:
        raise CheckpointError(f"{name}: {groups} groups of {group} do not fit {columns} inputs")
    perm = None
    if f"{name}.weight_g_idx" in source.forms:
        g_idx = source.take(f"{name}.weight_g_idx")
        if not bool((g_idx == -1).all()):
            check_form(source, f"{name}.weight_g_idx", (torch.int32, torch.int64), (columns,))
            perm, group = order_of(g_idx, groups)
    zero = _zero(source, name, bits, n, groups, padded)
    codes = codes if perm is None else codes[:, perm]
    return tensor_of(Integers(codes, bits, group, of_group, zero, perm), source.dtype)


def _zero(source: Source, name: str, bits: int, n: int, groups: int, padded: bool) -> Tensor | None:
    """Zero points (N, G), packed along the outputs or one in a byte; None: there are none."""
    full = f"{name}.weight_zero_point"
    if full not in source.forms:
        return None
    zero, (dtype, shape) = source.take(full), source.forms[full]
    packed = -(-n // (32 // bits)) if padded else words(n, bits)
    if dtype == torch.int32 and shape == (packed, groups):
        unpack = unpack_padded if padded else unpack_words
        return unpack(zero.t().contiguous(), bits, n).t().to(torch.int16)
    check_form(source, full, (torch.int8, torch.int32), (n, groups))
    return zero.to(torch.int16) + (1 << (bits - 1))


def _integers(source: Source, name: str) -> QTensor:
    """Signed integers, one in a byte."""
    (_, shape), (_, scale) = (source.forms[f"{name}.{p}"] for p in ("weight", "weight_scale"))
    check_form(source, f"{name}.weight", (torch.int8,), (None, None))
    check_form(source, f"{name}.weight_scale", _FLOATS, scale)
    n, columns = shape
    block = floats.block_of(shape, scale, arguments_of(source, name).get("block_structure"))
    if block[0] not in (1, -1):
        raise CheckpointError(
            f"{name}: int8 with blocks of {block} is not read; rows, groups and tensors are"
        )
    stored = source.take(f"{name}.weight_scale")
    groups = scale[1] if len(scale) == 2 and scale[0] == n else 1
    of_group = stored.reshape(-1, groups).expand(n, groups).contiguous()
    codes = source.take(f"{name}.weight").view(torch.uint8) ^ 128
    zero = None
    full = f"{name}.weight_zero_point"
    if full in source.forms:
        zero = source.take(full).reshape(-1, groups).expand(n, groups).to(torch.int16) + 128
    group = columns if groups == 1 else block[1]
    return tensor_of(Integers(codes, 8, group, of_group, zero), source.dtype)


def _fp8(source: Source, name: str) -> QTensor:
    shape, scale = (source.forms[f"{name}.{p}"][1] for p in ("weight", "weight_scale"))
    check_form(source, f"{name}.weight", (torch.float8_e4m3fn,), (None, None))
    size = (1, 32) if source.forms[f"{name}.weight_scale"][0] == torch.uint8 else None
    block = size or floats.block_of(shape, scale, arguments_of(source, name).get("block_structure"))
    codes, scales = (source.take(f"{name}.{p}") for p in ("weight", "weight_scale"))
    return floats.fp8(codes, scales, block, source.dtype)


def _fp4(source: Source, name: str) -> QTensor:
    packed, scale = (source.take(f"{name}.{p}") for p in ("weight_packed", "weight_scale"))
    if f"{name}.weight_global_scale" not in source.forms:
        return floats.fp4(packed, scale, source.dtype)
    if scale.dtype == torch.uint8:
        raise CheckpointError(f"{name}: scales are exponents, and there is a global scale")
    shared = source.take(f"{name}.weight_global_scale").float().reciprocal()
    return floats.nvfp4(packed, scale, shared, source.dtype)


def _kind(source: Source, name: str, of: str) -> str:
    """The format of a module that has the tensor `of` and scales; empty: it is not of these."""
    dtype, shape = source.forms[f"{name}.{of}"]
    scale = source.forms[f"{name}.weight_scale"][0]
    if len(shape) != 2:
        return ""
    if of == "weight_packed":
        fours = {torch.uint8: "mxfp4-pack-quantized", torch.float8_e4m3fn: "nvfp4-pack-quantized"}
        return "pack-quantized" if dtype == torch.int32 else fours.get(scale, "")
    if dtype == torch.int8:
        return "int-quantized"
    eights = {torch.uint8: "mxfp8-quantized"} | dict.fromkeys(_FLOATS, "float-quantized")
    return eights.get(scale, "") if dtype == torch.float8_e4m3fn else ""


_MAKE = {
    "pack-quantized": (
        _packed,
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    ),
    "int-quantized": (_integers, ("weight", "weight_scale", "weight_zero_point")),
    "float-quantized": (_fp8, ("weight", "weight_scale")),
    "mxfp8-quantized": (_fp8, ("weight", "weight_scale")),
    "mxfp4-pack-quantized": (_fp4, ("weight_packed", "weight_scale")),
    "nvfp4-pack-quantized": (_fp4, ("weight_packed", "weight_scale", "weight_global_scale")),
}


def _found(source: Source) -> dict[str, str]:
    """Module -> format."""
    found = {}
    for of in ("weight_packed", "weight"):
        for name in modules_with(source, of, "weight_scale"):
            if kind := _kind(source, name, of):
                found[name] = kind
    return found


#: elements of a scale, and of a byte
_BLOCKED = {
    "mxfp8-quantized": (32, 1),
    "mxfp4-pack-quantized": (32, 2),
    "nvfp4-pack-quantized": (16, 2),
}


def _scales(source: Source, found: Mapping[str, str]) -> list[Scales]:
    """Those of blocks along rows."""
    each = []
    for name, kind in found.items():
        if kind in _BLOCKED:
            size, held = _BLOCKED[kind]
            n, width = source.forms[f"{name}.{_MAKE[kind][1][0]}"][1]
            shared = f"{name}.weight_global_scale"
            shared = shared if shared in source.forms else ""
            each.append(Scales(f"{name}.weight_scale", n, -(-width * held // size), shared))
    return each


def read_compressed(source: Source) -> Reading:
    """Every module with a weight in one of the formats."""
    weights, found, refused = {}, _found(source), {}
    for name in modules_with(source, "compressed", "bitmask"):
        refused[f"{name}.weight"] = "sparse-24-bitmask is not read"
    for name in modules_with(source, "weight_packed", "scale_packed", "meta"):
        refused[f"{name}.weight"] = "marlin-24 is in the order of a kernel"
    label = str(source.quantization.get("format", ""))
    source, notes = mended(source, _scales(source, found), divides=True)
    for name, kind in found.items():
        make, parts = _MAKE[kind]
        names = tuple(f"{name}.{part}" for part in parts if f"{name}.{part}" in source.forms)
        weights[f"{name}.weight"] = ForeignWeight(
            names, partial(make, source, name), {"format": kind}
        )
    others = sorted(set(found.values()) - {label})
    known = label in ("", "mixed-precision", "naive-quantized") or not others
    note = f"the label says format={label!r}, and tensors are {', '.join(others)}"
    return Reading(weights, refused, notes if known else (*notes, note))


def _detect(source: Source) -> str:
    groups = source.quantization.get("config_groups")
    found = _found(source)
    packed = any(kind == "pack-quantized" for kind in found.values())
    if (
        not found
        or not (packed or isinstance(groups, Mapping))
        or "hf_quant" in source.quantization
    ):
        return ""
    if str(source.quantization.get("quant_method", "")) == "modelopt":
        return ""
    return f"{len(found)} modules have weight_scale and weights in {', '.join(sorted(set(found.values())))}"


COMPRESSED = Interchange(
    "compressed-tensors",
    _detect,
    read_compressed,
    compressed_write.write_compressed,
    compressed_write.config_of,
    "compressed-tensors: pack-quantized (1 to 8 bits), int, float, naive, nvfp4, mxfp4, mxfp8",
)

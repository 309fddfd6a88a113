"""torchao: the plain tensors of its subclasses, and what they are in the header of the safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec
from ao_core.ext import CheckpointError, QuantizationError, json_object
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_core.ext.numerics import pack_bits
from ao_quant.interchange import floats
from ao_quant.interchange.integers import (
    SCALES,
    Integers,
    assemble,
    integers_on,
    rows_of,
    tensor_of,
)
from ao_quant.interchange.naming import check_form
from ao_quant.interchange.scales import padded_size, swizzle, unswizzle
from ao_quant.interchange.words import flip_sign

__all__ = ["TORCHAO"]

_FLOATS = tuple(SCALES.values())
#: parts that say how activations are quantized with numbers of a calibration
_OF_ACTIVATIONS = (
    "act_pre_scale",
    "act_quant_scale",
    "act_quant_zero_point",
    "act_per_tensor_scale",
)


def _data(source: Source, name: str) -> dict[str, Any]:
    """The entry of a tensor in the header.

    Raises:
        CheckpointError: it is no such entry.
    """
    entry = json_object(source.metadata.get(name, ""), f"metadata of {name}")
    data, names = entry.get("_data", {}), entry.get("_tensor_data_names", [])
    texts = isinstance(names, list) and all(isinstance(each, str) for each in names)
    if not isinstance(entry.get("_type"), str) or not isinstance(data, dict) or not texts:
        raise CheckpointError(
            f"metadata of {name}: {entry!r:.80} has no _type, _data and _tensor_data_names"
        )
    return {
        "type": entry["_type"],
        "parts": names,
        **{k: v for k, v in data.items() if k not in ("type", "parts")},
    }


def _plain(value: Any) -> Any:
    """A value of `_data`: torch.bfloat16 is {"_type": "torch.dtype", "_data": "bfloat16"}."""
    return value.get("_data") if isinstance(value, dict) else value


def _prefix(name: str) -> str:
    owner, _, last = name.rpartition(".")
    return f"{owner}._{last}_"


def _block(data: Mapping[str, Any], shape: tuple[int, ...], name: str) -> tuple[int, int]:
    block = data.get("block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(b) is int and b > 0 for b in block)
    ):
        raise CheckpointError(f"metadata of {name}: block_size={block!r} is not that of a matrix")
    rows, columns = (WHOLE if b >= size else b for b, size in zip(block, shape, strict=True))
    return (
        (rows if shape[0] > 1 or block[0] != 1 else 1, columns) if block[0] != 1 else (1, columns)
    )


def _int4(take: Any, data: Mapping[str, Any], name: str, dtype: torch.dtype) -> QTensor:
    packed, scale, zero = take("qdata").view(torch.uint8), take("scale"), take("zero_point")
    n, k = packed.shape[0], 2 * packed.shape[1]
    group = _block(data, (n, k), name)[1]
    groups = 1 if group == WHOLE else -(-k // group)
    if scale.shape != zero.shape or tuple(scale.shape) != (groups, n) or scale.dtype != zero.dtype:
        raise CheckpointError(f"{name}: scales {list(scale.shape)} for {groups} groups of {n} rows")
    held = str(scale.dtype).removeprefix("torch.")
    spec = Spec("int4", (1, group), held, "offset", "packed")
    parts = {"qdata": packed, "scale": scale.t().contiguous(), "zero_point": -zero.t().contiguous()}
    return QTensor(parts, spec, (n, k), scale.dtype)


def _ints(take: Any, data: Mapping[str, Any], name: str, dtype: torch.dtype) -> QTensor:
    """Int8Tensor, and IntxUnpackedToInt8Tensor with any number of bits."""
    bits = 8
    if data["type"].startswith("Intx"):
        text = str(_plain(data.get("target_dtype")))
        bits = int(text[3:]) if text[:3] == "int" and text[3:] in "12345678" and text[3:] else 0
    codes, scale = take("qdata"), take("scale")
    n, k = codes.shape
    rows, group = _block(data, (n, k), name)
    if (
        not bits
        or codes.dtype != torch.int8
        or scale.dtype not in _FLOATS
        or rows not in (1, WHOLE)
    ):
        raise CheckpointError(
            f"{name}: {data['type']} of {codes.dtype} with blocks {data.get('block_size')}"
        )
    groups = 1 if group == WHOLE else -(-k // group)
    if scale.numel() not in (groups, n * groups) or (rows == 1) != (scale.numel() == n * groups):
        raise CheckpointError(f"{name}: scales {list(scale.shape)} for {groups} groups of {n} rows")
    low, high = (int(each) for each in torch.aminmax(codes)) if codes.numel() else (0, 0)
    if low < -(1 << (bits - 1)) or high >= 1 << (bits - 1):
        raise CheckpointError(f"{name}: codes from {low} to {high} are not of {bits} bits")
    of_group = scale.reshape(-1, groups).expand(n, groups).contiguous()
    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    size = k if group == WHOLE else group
    if "zero_point" not in data["parts"]:
        return tensor_of(Integers(unsigned, bits, size, of_group), dtype)
    zero = take("zero_point").reshape(-1, groups).expand(n, groups)
    if zero.dtype == torch.int8:
        stored = zero.to(torch.int16) + (1 << (bits - 1))
        return tensor_of(Integers(unsigned, bits, size, of_group, stored), dtype)
    held, name_of = str(of_group.dtype).removeprefix("torch."), "plain" if bits == 8 else "packed"
    spec = Spec(f"int{bits}", (1, group), held, "float", name_of)
    signed = flip_sign(unsigned, bits)
    return assemble(signed, spec, (n, k), dtype, of_group, zero.to(of_group.dtype).contiguous())


def _float8(take: Any, data: Mapping[str, Any], name: str, dtype: torch.dtype) -> QTensor:
    weight, scale = take("qdata"), take("scale")
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise CheckpointError(
            f"{name}: Float8Tensor of {weight.dtype} is not read; float8_e4m3fn is"
        )
    size = _block(data, tuple(weight.shape), name) if data.get("block_size") else None
    block = floats.block_of(tuple(weight.shape), tuple(scale.shape), size)
    return floats.fp8(weight, scale, block, dtype)


def _nvfp4(take: Any, data: Mapping[str, Any], name: str, dtype: torch.dtype) -> QTensor:
    packed, scale = take("qdata"), take("scale")
    n, k = packed.shape[0], 2 * packed.shape[1]
    if packed.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn or k % 16:
        raise CheckpointError(
            f"{name}: NVFP4Tensor of {packed.dtype} {list(packed.shape)} with scales of {scale.dtype} is not "
            "read; bytes (N, K / 2) with float8_e4m3fn for each 16 elements are"
        )
    if data.get("block_size") != 16:
        raise CheckpointError(f"{name}: block_size={data.get('block_size')!r} of NVFP4 is not 16")
    if data.get("is_swizzled_scales"):
        if scale.numel() != padded_size(n, k // 16):
            raise CheckpointError(
                f"{name}: {scale.numel()} scales for {[n, k // 16]} blocks in tiles of 128 × 4"
            )
        scale = unswizzle(scale, n, k // 16)[:n, : k // 16].contiguous()
    shared = take("per_tensor_scale") if "per_tensor_scale" in data["parts"] else torch.ones(())
    return floats.nvfp4(packed, scale, shared, dtype)


_MAKE = {
    "NVFP4Tensor": _nvfp4,
    "Int4Tensor": _int4,
    "Int8Tensor": _ints,
    "IntxUnpackedToInt8Tensor": _ints,
    "Float8Tensor": _float8,
}


def _make(source: Source, name: str) -> QTensor:
    data = _data(source, name)
    for part in data["parts"]:
        if _prefix(name) + part not in source.forms:
            raise CheckpointError(f"{_prefix(name)}{part} is missing")
    check_form(
        source,
        f"{_prefix(name)}qdata",
        (torch.int8, torch.uint8, torch.float8_e4m3fn),
        (None, None),
    )

    def take(part: str) -> Tensor:
        if part not in data["parts"]:
            raise CheckpointError(f"{name}: {data['type']} without {part}")
        return source.take(_prefix(name) + part)

    named = getattr(torch, str(_plain(data.get("dtype", data.get("orig_dtype")))), None)
    return _MAKE[data["type"]](take, data, name, named if named in _FLOATS else source.dtype)


def _names(source: Source) -> list[str]:
    try:
        names = json.loads(source.metadata.get("tensor_names", "[]"))
    except ValueError as error:
        raise CheckpointError(f"tensor_names in the header is no JSON: {error}") from error
    found = [
        n for n in source.metadata if "." in n and '"_tensor_data_names"' in source.metadata[n]
    ]
    return [n for n in found if isinstance(names, list)]


def _read(source: Source) -> Reading:
    weights, refused = {}, {}
    for name in _names(source):
        data = _data(source, name)
        names = tuple(_prefix(name) + part for part in data["parts"])
        extra = [p for p in data["parts"] if p in _OF_ACTIVATIONS]
        if data["type"] not in _MAKE:
            refused[name] = (
                f"{data['type']} with {', '.join(data['parts'])} is not read; {', '.join(_MAKE)} are. "
                "Dequantize it with torchao and save that"
            )
            continue
        if extra:
            refused[name] = (
                f"{data['type']} with {', '.join(extra)} is not read: scales of activations that were "
                "measured before. Quantize without them, or dequantize with torchao and save that"
            )
            continue
        settings: dict[str, Any] = {"class": data["type"]}
        if data["type"] == "NVFP4Tensor":
            settings |= {
                "swizzled": data.get("is_swizzled_scales") is True,
                "shared": "per_tensor_scale" in data["parts"],
            }
        weights[name] = ForeignWeight(names, partial(_make, source, name), settings)
    return Reading(weights, refused)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    base = rows_of(tensor)
    if base.dim() != 2:
        raise QuantizationError(f"{tuple(base.shape)} is no matrix, and others are not stored so")
    n, k = base.shape
    spec, kind = base.spec, floats.kind_of(base)
    own = _dtype(tensor.dtype)
    data: dict[str, Any]
    if kind == "fp8":
        sizes = [size if b == WHOLE else b for b, size in zip(spec.block, (n, k), strict=True)]
        data = {"block_size": sizes, "mm_config": None, "act_quant_kwargs": None, "dtype": own}
        data["kernel_preference"] = {"_type": "KernelPreference", "_data": "AUTO"}
        return _written(name, "Float8Tensor", data, {"qdata": base.qdata, "scale": base.scale})
    if kind == "nvfp4":
        return _nvfp4_written(name, base, settings)
    if (
        spec.dtype == "int4"
        and spec.zero_point == "offset"
        and spec.block[0] == 1
        and not spec.input
    ):
        group = k if spec.block[1] == WHOLE else spec.block[1]
        parts = (base.qdata, base.scale.t().contiguous(), -base.zero_point.t().contiguous())
        return _int4_written(name, group, (n, k), parts, tensor.dtype)
    found = integers_on(base, tuple(range(1, 9)), scale=(tensor.dtype, *_FLOATS))
    wanted = settings.get("class")
    if k % found.group:
        raise QuantizationError(f"groups of {found.group} do not divide rows of {k}")
    if found.bits == 4 and found.zero is None and not k % 2 and wanted in (None, "Int4Tensor"):
        scale = found.scale.t().contiguous()
        packed = pack_bits(flip_sign(found.codes, 4), 4)
        return _int4_written(
            name, found.group, (n, k), (packed, scale, torch.zeros_like(scale)), tensor.dtype
        )
    middle = 1 << (found.bits - 1)
    codes = (found.codes.to(torch.int16) - middle).to(torch.int8)
    if (
        found.bits == 8
        and found.zero is None
        and found.group >= k
        and wanted in (None, "Int8Tensor")
    ):
        data = {"act_quant_kwargs": None, "reduce_range": False, "block_size": [1, k], "dtype": own}
        return _written(name, "Int8Tensor", data, {"qdata": codes, "scale": found.scale})
    data = {
        "target_dtype": {"_type": "torch.dtype", "_data": f"int{found.bits}"},
        "block_size": [1, found.group],
        "dtype": own,
        "activation_quantization": None,
    }
    zero = (found.zeros - middle).to(torch.int8)
    return _written(
        name,
        "IntxUnpackedToInt8Tensor",
        data,
        {"qdata": codes, "scale": found.scale, "zero_point": zero},
    )


def _dtype(dtype: torch.dtype) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}


def _int4_written(
    name: str,
    group: int,
    shape: tuple[int, int],
    parts: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> Written:
    data = {
        "activation_dtype": _dtype(torch.bfloat16),
        "block_size": [1, group],
        "shape": list(shape),
    }
    return _written(
        name, "Int4Tensor", data, dict(zip(("qdata", "scale", "zero_point"), parts, strict=True))
    )


def _nvfp4_written(name: str, base: QTensor, settings: Mapping[str, Any]) -> Written:
    """With the number for all scales, unless it is 1 and the source had none."""
    scale, shared = base.scale.qdata, base.scale.scale.reshape(())  # type: ignore[attr-defined]
    tiles = bool(settings.get("swizzled"))
    if tiles:
        scale = swizzle(scale)
        scale = scale.reshape(scale.shape[0] // 4, scale.shape[1] * 4)  # 32 × 16 a tile
    data = {
        "is_swizzled_scales": tiles,
        "use_triton_kernel": False,
        "act_quant_kwargs": None,
        "block_size": 16,
        "orig_dtype": _dtype(base.dtype),
    }
    parts = {"per_tensor_scale": shared, "qdata": base.qdata, "scale": scale}
    if settings.get("shared") is False and float(shared) == 1:
        del parts["per_tensor_scale"]
    return _written(name, "NVFP4Tensor", data, parts)


def _written(name: str, kind: str, data: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Written:
    entry = {"_type": kind, "_data": dict(data), "_tensor_data_names": list(parts)}
    return Written({_prefix(name) + part: each for part, each in parts.items()}, entry)


def _metadata(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    entries = {name: json.dumps(entry) for name, entry in settings.items()}
    return {"format": "pt", "tensor_names": json.dumps(list(settings)), **entries}


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {},
        "modules_to_not_convert": list(dense) or None,
    }


def _detect(source: Source) -> str:
    if "tensor_names" not in source.metadata:
        return ""
    found = len(_names(source))
    return f"the header describes {found} tensors of torchao's classes" if found else ""


TORCHAO = Interchange(
    "torchao",
    _detect,
    _read,
    _write,
    _config,
    "torchao's safetensors: Int4Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor, NVFP4Tensor",
    _metadata,
)

"""HQQ: codes in distant fractions of words, with zero points that are numbers, as hqq's own layers save them.

The weight is cut into rows of one group each (axis 1), or into columns (axis 0): then a group is no block of
the weight, and it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_core.ext.kernels import unpack_parts
from ao_quant.interchange.integers import SCALES, assemble, integers_on, rows_of
from ao_quant.interchange.naming import check_form, modules_with
from ao_quant.interchange.words import pack_fractions, unpack_fractions

__all__ = ["HQQ"]

_BITS = (1, 2, 3, 4, 8)
_PACKING = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
_KEYS = (
    "W_q", "scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype",
    "view_as_float", "compute_dtype", "channel_wise", "optimize", "round_zero", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "quant_scale", "quant_zero",
)  # fmt: skip


def _number(source: Source, name: str, key: str) -> int:
    full = f"{name}.{key}"
    if full not in source.forms or source.forms[full][1] not in ((), (1,)):
        raise CheckpointError(f"{full} is no number")
    return int(source.take(full).reshape(-1)[0])


def _text(source: Source, name: str, key: str, default: str) -> str:
    full = f"{name}.{key}"
    if full not in source.forms:
        return default
    check_form(source, full, (torch.uint8,), (None,))
    return bytes(source.take(full).tolist()).decode("latin-1")


def _make(source: Source, name: str) -> QTensor:
    bits, group = _number(source, name, "nbits"), _number(source, name, "group_size")
    check_form(source, f"{name}.shape", (torch.int64, torch.int32), (2,))
    n, k = source.take(f"{name}.shape").tolist()
    packing = _text(source, name, "packing", _PACKING.get(bits, ""))
    if bits not in _BITS or packing != _PACKING[bits] or group < 1 or min(n, k) < 1 or k % group:
        raise CheckpointError(
            f"{name}: nbits={bits}, packing={packing!r}, group_size={group} of {[n, k]}"
        )
    rows = n * (k // group)
    words = source.take(f"{name}.W_q")
    if words.is_floating_point():
        words = words.view(torch.int32 if bits == 3 else torch.uint8)
    count = 10 if bits == 3 else 8 // bits
    if words.dtype not in (torch.uint8, torch.int32) or tuple(words.shape) != (
        -(-rows // count),
        group,
    ):
        raise CheckpointError(
            f"{name}.W_q {list(words.shape)} does not fit {rows} groups of {group}"
        )
    scale, zero = source.take(f"{name}.scale"), source.take(f"{name}.zero")
    if scale.numel() != rows or zero.numel() != rows or scale.dtype not in SCALES.values():
        raise CheckpointError(f"{name}: {scale.numel()} scales of {scale.dtype} for {rows} groups")
    if zero.dtype != scale.dtype:
        raise CheckpointError(f"{name}: scales are {scale.dtype}, and zero points {zero.dtype}")
    codes = unpack_fractions(words, bits, rows).reshape(n, k)
    held = str(scale.dtype).removeprefix("torch.")
    spec = Spec(f"uint{bits}", (1, group), held, "float", "plain" if bits == 8 else "packed")
    named = _text(source, name, "compute_dtype", "torch.float16").removeprefix("torch.")
    dtype = SCALES.get(named, source.dtype)
    grid = (n, k // group)
    return assemble(codes, spec, (n, k), dtype, scale.reshape(grid), zero.reshape(grid))


def _read(source: Source) -> Reading:
    weights, refused = {}, {}
    for name in modules_with(source, "W_q", "scale", "zero"):
        if f"{name}.axis" in source.forms and _number(source, name, "axis") == 0:
            refused[f"{name}.weight"] = (
                "axis=0: a group is one column of each so many rows, no block of the weight"
            )
            continue
        names = tuple(f"{name}.{key}" for key in _KEYS if f"{name}.{key}" in source.forms)
        weights[f"{name}.weight"] = ForeignWeight(names, partial(_make, source, name))
    return Reading(weights, refused)


def _encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode("latin-1")), dtype=torch.uint8)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    base, owner = rows_of(tensor), name.removesuffix(".weight")
    if base.dim() != 2:
        raise QuantizationError(f"{tuple(base.shape)} is no matrix, and others are not stored so")
    n, k = base.shape
    floats = base.spec.zero_point == "float" and not base.spec.input and base.format.bits in _BITS
    if floats and base.spec.dtype.startswith("uint") and base.spec.block[0] == 1:
        codes, _, zero = unpack_parts(base.parts, base.spec, (n, k))
        bits, group, scale = base.format.bits, base.spec.block[1], base.scale
        assert zero is not None
        zero = zero.to(scale.dtype)
    else:
        found = integers_on(base, _BITS, scale=tuple(SCALES.values()))
        codes, bits, group, scale = found.codes, found.bits, found.group, found.scale
        zero = found.zeros.to(scale.dtype)
    group = k if group < 0 else group
    if k % group:
        raise QuantizationError(f"groups of {group} do not divide rows of {k}")
    flags = {
        "view_as_float": 0,
        "channel_wise": 1,
        "optimize": 1,
        "round_zero": 0,
        "offload_meta": 0,
        "quant_scale": 0,
        "quant_zero": 0,
    }
    bools = {key: torch.tensor(value, dtype=torch.uint8) for key, value in flags.items()}
    tensors = {
        "W_q": pack_fractions(codes.reshape(-1, group), bits),
        "scale": scale.reshape(-1, 1),
        "zero": zero.reshape(-1, 1),
        **{
            key: torch.tensor(v, dtype=torch.int32)
            for key, v in (("nbits", bits), ("group_size", group), ("axis", 1))
        },
        "shape": torch.tensor((n, k)),
        "packing": _encoded(_PACKING[bits]),
        "unpack_view_dtype": _encoded("torch.int32" if bits == 3 else "torch.uint8"),
        "compute_dtype": _encoded(str(tensor.dtype)),
        **bools,
        "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
        "stores_quant_config": torch.tensor(1, dtype=torch.uint8),
    }
    used = {"nbits": bits, "group_size": group}
    return Written({f"{owner}.{key}": each for key, each in tensors.items()}, used)


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    first = next(iter(settings.values()), {"nbits": 4, "group_size": 64})
    weights = {**first, "axis": 1, "channel_wise": True, "optimize": True, "round_zero": False}
    return {
        "quant_method": "hqq",
        "quant_config": {
            "weight_quant_params": weights,
            "scale_quant_params": None,
            "zero_quant_params": None,
        },
        "skip_modules": list(dense),
    }


def _detect(source: Source) -> str:
    found = len(list(modules_with(source, "W_q", "scale", "zero")))
    return f"{found} modules have W_q, scale and zero" if found else ""


HQQ = Interchange("hqq", _detect, _read, _write, _config, "HQQ with axis=1: 1, 2, 3, 4 and 8 bits")

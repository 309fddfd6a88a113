"""MLX: the bit stream in words of uint32, W = scales · q + biases, and its microscaling modes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ao_core import QTensor, Spec
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_quant.interchange import floats
from ao_quant.interchange.integers import SCALES, assemble, integers_on, offsets_of, rows_of
from ao_quant.interchange.naming import check_form, modules_with
from ao_quant.interchange.words import pack_words, unpack_words

__all__ = ["MLX"]

_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32)}


def _settings(source: Source, name: str) -> Mapping[str, Any]:
    """What the label says of a module: its own entry, or that of all."""
    own = source.quantization.get(name)
    return own if isinstance(own, Mapping) else source.quantization


def _affine(source: Source, name: str) -> QTensor:
    (n, width), scale = source.forms[f"{name}.weight"][1], source.forms[f"{name}.scales"]
    check_form(source, f"{name}.weight", (torch.uint32,), (None, None))
    check_form(source, f"{name}.scales", tuple(SCALES.values()), (n, None))
    check_form(source, f"{name}.biases", (scale[0],), scale[1])
    label = _settings(source, name)
    bits, group = label.get("bits", 4), label.get("group_size", 64)
    columns = group * scale[1][1] if type(group) is int else 0
    if bits not in _BITS or group not in _GROUPS or columns * bits != 32 * width:
        raise CheckpointError(
            f"{name}: {width} words and {scale[1][1]} groups are not of bits={bits!r}, group_size={group!r}"
        )
    codes = unpack_words(source.take(f"{name}.weight"), bits, columns)
    held = str(scale[0]).removeprefix("torch.")
    spec = Spec(f"uint{bits}", (1, group), held, "offset", "plain" if bits == 8 else "packed")
    bias = source.take(f"{name}.biases")
    return assemble(codes, spec, (n, columns), scale[0], source.take(f"{name}.scales"), -bias)


def _micro(source: Source, name: str) -> QTensor:
    mode = str(_settings(source, name).get("mode", "mxfp4"))
    if mode not in _MODES:
        raise CheckpointError(
            f"{name}: mode={mode!r} is not read; affine, {' and '.join(_MODES)} are"
        )
    check_form(source, f"{name}.weight", (torch.uint32,), (None, None))
    packed = source.take(f"{name}.weight").contiguous().view(torch.uint8)
    scale = source.take(f"{name}.scales")
    if mode == "mxfp4":
        return floats.fp4(packed, scale, source.dtype)
    return floats.fp8(packed, scale, (1, 32), source.dtype)


def _read(source: Source) -> Reading:
    weights = {}
    for name in _modules(source):
        affine = f"{name}.biases" in source.forms
        parts = ("weight", "scales", "biases") if affine else ("weight", "scales")
        make = partial(_affine if affine else _micro, source, name)
        weights[f"{name}.weight"] = ForeignWeight(tuple(f"{name}.{p}" for p in parts), make)
    return Reading(weights)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    base, owner = rows_of(tensor), name.removesuffix(".weight")
    kind = floats.kind_of(base)
    if kind in _MODES and base.dim() == 2:
        bits, group = _MODES[kind]
        words = base.qdata.view(torch.uint8).contiguous().view(torch.uint32)
        tensors = {"weight": words, "scales": base.scale.view(torch.uint8)}
        used = {"bits": bits, "group_size": group, "mode": kind}
    else:
        spec = base.spec
        own = (
            spec.zero_point == "offset"
            and base.format.bits in _BITS
            and spec.block in [(1, g) for g in _GROUPS]
        )
        if (
            own
            and spec.dtype.startswith("uint")
            and isinstance(spec.scale_dtype, str)
            and not spec.input
        ):
            codes, _, _ = base.layout_record.unpack(
                base.parts, spec, tuple(base.shape), base.format
            )
            bits, group, scale, bias = base.format.bits, spec.block[1], base.scale, -base.zero_point
        elif (
            spec.zero_point == "float"
            and spec.block in [(1, g) for g in _GROUPS]
            and (offsets := offsets_of(base)) is not None
            and offsets.bits in _BITS
        ):
            codes, bits, group, scale = offsets[:4]
            bias = (-offsets.offset).to(scale.dtype)
        else:
            held = tensor.dtype if tensor.dtype in SCALES.values() else torch.float16
            found = integers_on(base, _BITS, scale=(held,), whole=False, groups=_GROUPS)
            codes, bits, group, scale = found.codes, found.bits, found.group, found.scale
            bias = (-found.zeros * scale.float()).to(held)
        if (base.shape[1] * bits) % 32 or base.shape[1] % group:
            raise QuantizationError(
                f"rows of {base.shape[1]} are in no whole words and groups of {group}"
            )
        tensors = {"weight": pack_words(codes, bits, torch.uint32), "scales": scale, "biases": bias}
        used = {"bits": bits, "group_size": group, "mode": "affine"}
    return Written({f"{owner}.{part}": each for part, each in tensors.items()}, used)


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    first = dict(next(iter(settings.values()), {"bits": 4, "group_size": 64, "mode": "affine"}))
    others = {
        name.removesuffix(".weight"): dict(used)
        for name, used in settings.items()
        if dict(used) != first
    }
    return first | others | dict.fromkeys(dense, False)


def _modules(source: Source) -> list[str]:
    return [
        name
        for name in modules_with(source, "weight", "scales")
        if source.forms[f"{name}.weight"][0] == torch.uint32
    ]


def _detect(source: Source) -> str:
    found = len(_modules(source))
    return f"{found} modules have weights of uint32 and scales" if found else ""


MLX = Interchange(
    "mlx", _detect, _read, _write, _config, "MLX: affine of 2 to 8 bits, mxfp4, mxfp8"
)

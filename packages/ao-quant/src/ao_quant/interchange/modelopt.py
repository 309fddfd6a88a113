"""NVIDIA Model Optimizer: FP8, NVFP4, INT4 and INT8, with the scales of inputs that AWQ leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import WHOLE, QTensor
from ao_core.ext import SCALE, CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_core.ext.numerics import pack_bits, unpack_bits
from ao_quant.interchange import floats
from ao_quant.interchange.integers import Integers, integers_on, rows_of, tensor_of
from ao_quant.interchange.naming import check_form, modules_with, quantized_by
from ao_quant.interchange.scales import Scales, mended

__all__ = ["MODELOPT"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PARTS = ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale")


def _kind(source: Source, name: str) -> str:
    """The algorithm of a module, by its tensors; empty: none that is known."""
    (dtype, shape), (scale, grid) = (
        source.forms[f"{name}.{p}"] for p in ("weight", "weight_scale")
    )
    if len(shape) != 2:
        return ""
    if dtype == torch.float8_e4m3fn:
        return "FP8" if scale in _FLOATS else "MXFP8" if scale == torch.uint8 else ""
    if dtype == torch.int8:
        return "W8A16"
    if dtype == torch.uint8 and scale == torch.float8_e4m3fn:
        return "NVFP4" if f"{name}.weight_scale_2" in source.forms else ""
    fours = len(grid) == 2 and grid[0] == 2 * shape[0]
    return "W4A16_AWQ" if dtype == torch.uint8 and scale in _FLOATS and fours else ""


def _integers(source: Source, name: str, bits: int) -> QTensor:
    weight, scale = (source.take(f"{name}.{p}") for p in ("weight", "weight_scale"))
    check_form(source, f"{name}.weight_scale", _FLOATS, tuple(scale.shape))
    if bits == 4:  # the low half of a byte has an even row
        pairs = unpack_bits(weight.t().contiguous(), 4, 2 * weight.shape[0])
        codes = pairs.t().contiguous() ^ 8
    else:
        codes = weight.view(torch.uint8) ^ 128
    n, k = codes.shape
    of_group = scale.reshape(-1, 1) if scale.dim() == 1 else scale
    of_group = (
        of_group.expand(n, of_group.shape[1]).contiguous() if of_group.shape[0] == 1 else of_group
    )
    if of_group.shape[0] != n or not of_group.shape[1] or k % of_group.shape[1]:
        raise CheckpointError(f"{name}: scales {list(scale.shape)} for {[n, k]} elements")
    return tensor_of(Integers(codes, bits, k // of_group.shape[1], of_group), source.dtype)


def _make(source: Source, name: str, kind: str) -> QTensor:
    if kind in ("W4A16_AWQ", "W8A16"):
        tensor = _integers(source, name, 4 if kind == "W4A16_AWQ" else 8)
    elif kind == "NVFP4":
        packed, scale, shared = (source.take(f"{name}.{p}") for p in _PARTS[:3])
        tensor = floats.nvfp4(packed, scale, shared, source.dtype)
    else:
        weight, scale = (source.take(f"{name}.{p}") for p in _PARTS[:2])
        block = (
            (1, 32)
            if kind == "MXFP8"
            else floats.block_of(tuple(weight.shape), tuple(scale.shape), (128, 128))
        )
        tensor = floats.fp8(weight, scale, block, source.dtype)
    full = f"{name}.pre_quant_scale"
    if full not in source.forms:
        return tensor
    check_form(source, full, _FLOATS, (tensor.shape[1],))
    spec = replace(tensor.spec, input=(SCALE,))
    step = source.take(full).float()
    if not bool(step.isfinite().all()) or bool((step == 0).any()):
        raise CheckpointError(f"{full} has values that are 0 or not finite")
    parts = {**tensor.parts, "in_scale": step.reshape(1, -1)}
    return QTensor(parts, spec, tuple(tensor.shape), tensor.dtype)


def _scales(source: Source, kinds: Mapping[str, str]) -> list[Scales]:
    """Those of blocks along rows."""
    each = []
    for name, kind in kinds.items():
        if kind in ("NVFP4", "MXFP8"):
            n, width = source.forms[f"{name}.weight"][1]
            blocks = -(-2 * width // 16) if kind == "NVFP4" else -(-width // 32)
            shared = f"{name}.weight_scale_2" if kind == "NVFP4" else ""
            each.append(Scales(f"{name}.weight_scale", n, blocks, shared))
    return each


def _read(source: Source) -> Reading:
    weights, refused = {}, {}
    kinds = {name: _kind(source, name) for name in modules_with(source, "weight", "weight_scale")}
    source, notes = mended(source, _scales(source, kinds))
    for name, kind in kinds.items():
        names = tuple(f"{name}.{p}" for p in _PARTS if f"{name}.{p}" in source.forms)
        if kind:
            step = source.forms.get(f"{name}.pre_quant_scale")
            settings = {
                "kind": kind,
                "step": None if step is None else str(step[0]).removeprefix("torch."),
            }
            weights[f"{name}.weight"] = ForeignWeight(
                names, partial(_make, source, name, kind), settings
            )
        else:
            refused[f"{name}.weight"] = "its weight and scales are of no algorithm that is known"
    return Reading(weights, refused, notes)


def _without_step(tensor: QTensor) -> tuple[QTensor, Tensor | None]:
    """The stored weight, and the scale of its inputs."""
    base = rows_of(tensor)
    if base.spec.input != (SCALE,):
        return base, None
    parts = {name: part for name, part in base.parts.items() if name != "in_scale"}
    return base.like(parts, spec=replace(base.spec, input=())), base.parts["in_scale"].reshape(-1)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    base, step = _without_step(tensor)
    owner, kind = name.removesuffix(".weight"), floats.kind_of(base)
    if kind == "nvfp4":
        scale: Any = base.scale
        tensors = {
            "weight": base.qdata,
            "weight_scale": scale.qdata,
            "weight_scale_2": scale.scale.reshape(()),
        }
        used: dict[str, Any] = {
            "quant_algo": "NVFP4" if step is None else "NVFP4_AWQ",
            "group_size": 16,
        }
    elif kind in ("fp8", "mxfp8"):
        one = base.spec.block == (WHOLE, WHOLE)
        row = base.spec.block == (1, WHOLE)
        scale = base.scale.reshape(()) if one else base.scale.reshape(-1) if row else base.scale
        tensors = {
            "weight": base.qdata,
            "weight_scale": scale.view(torch.uint8) if kind == "mxfp8" else scale,
        }
        algorithm = "FP8" if one else "FP8_PER_CHANNEL_PER_TOKEN" if row else "FP8_PB_WO"
        used = {"quant_algo": "MXFP8" if kind == "mxfp8" else algorithm, "group_size": None}
    else:
        found = integers_on(base, (4, 8), scale=_FLOATS, symmetric=True)
        if found.bits == 8 and found.scale.shape[1] == 1:
            tensors = {
                "weight": (found.codes ^ 128).view(torch.int8),
                "weight_scale": found.scale.reshape(-1),
            }
            used = {"quant_algo": "W8A16", "group_size": None}
        else:
            if found.bits == 8 or base.shape[0] % 2 or base.shape[1] % found.group:
                found = integers_on(base, (4,), scale=_FLOATS, groups=(128, 64, 32), symmetric=True)
            if base.shape[0] % 2:
                raise QuantizationError(f"{base.shape[0]} rows are in no pairs")
            pairs = pack_bits((found.codes ^ 8).t().contiguous(), 4).t().contiguous()
            tensors = {"weight": pairs, "weight_scale": found.scale}
            used = {"quant_algo": "W4A16_AWQ", "group_size": found.group}
    if step is not None:
        dtype = getattr(torch, str(settings.get("step") or "float32"))
        tensors["pre_quant_scale"] = step.to(dtype)
    used["pre_quant_scale"] = step is not None
    return Written({f"{owner}.{part}": each for part, each in tensors.items()}, used)


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    kinds = [dict(used) for used in settings.values()]
    mixed = any(used != kinds[0] for used in kinds)
    layers = {name.removesuffix(".weight"): dict(used) for name, used in settings.items()}
    rest = {"quantized_layers": layers} if mixed else (kinds[0] if kinds else {})
    algorithm = "MIXED_PRECISION" if mixed else (kinds[0]["quant_algo"] if kinds else None)
    return {
        **{key: value for key, value in rest.items() if value is not None},
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "exclude_modules": list(dense),
        "ignore": list(dense),
        "producer": {"name": "ao"},
    }


def _detect(source: Source) -> str:
    labelled = quantized_by(source, "modelopt", "modelopt_fp4") or "hf_quant" in source.quantization
    # only it has this second scale beside bytes of two numbers
    found = [n for n in modules_with(source, "weight", "weight_scale") if _kind(source, n)]
    own = any(_kind(source, name) == "NVFP4" for name in found)
    return (
        f"{len(found)} modules have weights with weight_scale"
        if found and (labelled or own)
        else ""
    )


MODELOPT = Interchange(
    "modelopt",
    _detect,
    _read,
    _write,
    _config,
    "NVIDIA Model Optimizer: FP8, MXFP8, NVFP4, W4A16 and W8A16, with pre_quant_scale",
)

"""FP8 by blocks, as DeepSeek and transformers store it, by rows as FBGEMM does, and with one scale."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ao_core import WHOLE, QTensor
from ao_core.ext import QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_quant.interchange import floats
from ao_quant.interchange.naming import check_form, modules_with, quantized_by

__all__ = ["FBGEMM", "FP8"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _make(source: Source, name: str, suffix: str) -> QTensor:
    (_, shape), (_, scale) = (source.forms[f"{name}.{each}"] for each in ("weight", suffix))
    check_form(source, f"{name}.weight", (torch.float8_e4m3fn,), (None, None))
    check_form(source, f"{name}.{suffix}", (*_FLOATS, torch.float8_e8m0fnu), scale)
    block = floats.block_of(shape, scale, source.quantization.get("weight_block_size"))
    # it is multiplied with, whatever its name
    codes, scales = (source.take(f"{name}.{each}") for each in ("weight", suffix))
    return floats.fp8(codes, scales, block, source.dtype)


def _modules(source: Source, suffix: str) -> list[str]:
    return [
        name
        for name in modules_with(source, "weight", suffix)
        if source.forms[f"{name}.weight"][0] == torch.float8_e4m3fn
        and len(source.forms[f"{name}.weight"][1]) == 2
    ]


def _suffix(source: Source) -> str:
    return (
        "weight_scale_inv"
        if any(n.endswith(".weight_scale_inv") for n in source.forms)
        else "weight_scale"
    )


def _read(source: Source) -> Reading:
    weights = {}
    for suffix in ("weight_scale_inv", "weight_scale"):
        for name in _modules(source, suffix):
            names = (f"{name}.weight", f"{name}.{suffix}")
            weights[f"{name}.weight"] = ForeignWeight(names, partial(_make, source, name, suffix))
    notes = []
    if str(source.quantization.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        notes.append(
            f"the label says fmt={source.quantization['fmt']!r}, and tensors are float8_e4m3fn"
        )
    return Reading(weights, notes=tuple(notes))


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any], *, rows: bool) -> Written:
    owner = name.removesuffix(".weight")
    kept = floats.is_fp8(tensor) and (tensor.spec.block != (1, WHOLE)) != rows
    block = tensor.spec.block if kept else (1, WHOLE) if rows else (128, 128)
    base = floats.rounded(tensor, "fp8", (block[-2], block[-1]))
    one = block == (WHOLE, WHOLE)
    suffix = "weight_scale" if rows or one else "weight_scale_inv"
    scale = base.scale.reshape(()) if one else base.scale
    used = {"block": None if rows or one else list(block)}
    return Written({f"{owner}.weight": base.qdata, f"{owner}.{suffix}": scale}, used)


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    blocks = {tuple(used["block"] or ()) for used in settings.values()}
    if len(blocks) > 1:
        raise QuantizationError(
            f"blocks of {sorted(blocks)}: this format has one size for all weights"
        )
    block = blocks.pop() if blocks else (128, 128)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block) or None,
        "modules_to_not_convert": list(dense) or None,
    }


def _config_of_rows(
    settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": list(dense),
    }


def _detect(source: Source, *, rows: bool) -> str:
    found = len(_modules(source, _suffix(source)))
    labelled = quantized_by(source, "fbgemm_fp8" if rows else "fp8")
    inverse = _suffix(source) == "weight_scale_inv" and not rows
    return (
        f"{found} modules have weights of float8 and {_suffix(source)}"
        if found and (labelled or inverse)
        else ""
    )


FP8 = Interchange(
    "fp8",
    partial(_detect, rows=False),
    _read,
    partial(_write, rows=False),
    _config,
    "FP8 of DeepSeek and transformers: one scale for a block, or for a weight",
)
FBGEMM = Interchange(
    "fbgemm_fp8",
    partial(_detect, rows=True),
    _read,
    partial(_write, rows=True),
    _config_of_rows,
    "FP8 of FBGEMM: one scale per row",
)

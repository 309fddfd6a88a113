"""MXFP4 of experts as gpt-oss stores them: blocks of 16 bytes, exponents beside them, weights transposed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_quant.interchange import floats
from ao_quant.interchange.naming import check_form

__all__ = ["MXFP4"]


def _make(source: Source, name: str) -> QTensor:
    check_form(source, f"{name}_blocks", (torch.uint8,), (None, None, None, 16))
    shape = source.forms[f"{name}_blocks"][1][:-1]
    check_form(source, f"{name}_scales", (torch.uint8,), shape)
    blocks, scale = source.take(f"{name}_blocks"), source.take(f"{name}_scales")
    if not all(shape):
        raise CheckpointError(f"{name}: {list(shape)} has no elements")
    return floats.fp4(blocks.flatten(-2), scale, source.dtype).transpose(1, 2)  # type: ignore[return-value]


def _names(source: Source) -> list[str]:
    owners = [name.removesuffix("_blocks") for name in source.forms if name.endswith("_blocks")]
    return [name for name in owners if f"{name}_scales" in source.forms]


def _read(source: Source) -> Reading:
    return Reading(
        {
            name: ForeignWeight((f"{name}_blocks", f"{name}_scales"), partial(_make, source, name))
            for name in _names(source)
        }
    )


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    if tensor.dim() != 3 or tensor.shape[1] % 32:
        raise QuantizationError(f"{tuple(tensor.shape)} is not (experts, inputs in 32, outputs)")
    stored = tensor.canonical().transpose(1, 2)
    assert isinstance(stored, QTensor)
    if stored.is_permuted or floats.kind_of(stored) != "mxfp4":
        spec = Spec("f4e2m1", (1, 32), "e8m0", layout="packed")
        stored = quantize_tensor(stored.dequantize(torch.float32).contiguous(), spec)
    blocks = stored.qdata.unflatten(-1, (-1, 16))
    return Written({f"{name}_blocks": blocks, f"{name}_scales": stored.scale.view(torch.uint8)})


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(dense)}


def _detect(source: Source) -> str:
    found = len(_names(source))
    return f"{found} weights have blocks and scales" if found else ""


MXFP4 = Interchange("mxfp4", _detect, _read, _write, _config, "MXFP4 of gpt-oss: stacks of experts")

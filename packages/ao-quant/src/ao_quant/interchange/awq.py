"""AWQ: the layouts gemm, gemv and gemv_fast of AutoAWQ and llm-awq, all of 4 bits.

W[n, k] = scales[g, n] · (q[k, n] - z[g, n]); gemv_fast stores -z · scales in place of z.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_quant.interchange.integers import Integers, assemble, integers_on, tensor_of
from ao_quant.interchange.naming import AUTOROUND, check_form, modules_with, quantized_by
from ao_quant.interchange.words import AWQ_ORDER, pack_words, reorder, unpack_words

__all__ = ["AWQ", "AWQ_GEMV", "AWQ_GEMV_FAST", "gemm_modules", "read_gemm", "write_gemm"]

_HALF = (torch.float16, torch.bfloat16, torch.float32)
_PARTS = ("qweight", "qzeros", "scales")


def _modules(source: Source, kind: str) -> list[str]:
    """Modules whose tensors have the dtypes and shapes of such a layout."""
    return [name for name in modules_with(source, *_PARTS) if _kind(source, name) == kind]


def _kind(source: Source, name: str) -> str:
    (dtype, code), (_, zero), (_, scale) = (source.forms[f"{name}.{each}"] for each in _PARTS)
    if len(code) != 2 or len(zero) != 2 or len(scale) != 2:
        return ""
    if dtype == torch.int16 and scale == zero and 4 * code[0] == scale[1]:
        return "gemv_fast"
    if dtype == torch.int32 and 8 * code[1] == scale[1] and zero == (scale[0], code[1]):
        return "gemm"
    if dtype == torch.int32 and code[0] == scale[0] == zero[0] and scale[1] == 8 * zero[1]:
        return "gemv"
    return ""


def _group(source: Source, name: str, columns: int, groups: int) -> int:
    """Columns of a group; of layouts that pad scales, by the label."""
    label = source.quantization.get("group_size", source.quantization.get("q_group_size", 128))
    group = columns if label == -1 else label
    if type(group) is not int or group < 1 or -(-columns // group) > groups:
        raise CheckpointError(
            f"{name}: group_size={label!r} does not fit {columns} inputs in {groups} groups"
        )
    return group


def gemm_modules(source: Source) -> list[str]:
    """Modules in the layout gemm."""
    return _modules(source, "gemm")


def _gemm(source: Source, name: str) -> QTensor:
    (columns, _), (groups, n) = (
        source.forms[f"{name}.{each}"][1] for each in ("qweight", "scales")
    )
    check_form(source, f"{name}.scales", _HALF, (groups, n))
    if not groups or columns % groups:
        raise CheckpointError(f"{name}: {columns} inputs are in no {groups} equal groups")

    def codes(part: str) -> Tensor:
        stream = unpack_words(source.take(f"{name}.{part}"), 4, n)
        return reorder(stream, AWQ_ORDER, inverse=True).t().contiguous()

    scale = source.take(f"{name}.scales").t().contiguous()
    found = Integers(codes("qweight"), 4, columns // groups, scale, codes("qzeros").to(torch.int16))
    return tensor_of(found, source.dtype)


def _gemv(source: Source, name: str) -> QTensor:
    (_n, width), (_, padded) = (source.forms[f"{name}.{each}"][1] for each in ("qweight", "scales"))
    columns = 8 * width
    group = _group(source, name, columns, padded)
    groups = -(-columns // group)
    codes = unpack_words(source.take(f"{name}.qweight"), 4, columns)
    zero = unpack_words(source.take(f"{name}.qzeros"), 4, padded)[:, :groups].to(torch.int16)
    scale = source.take(f"{name}.scales")[:, :groups].contiguous()
    return tensor_of(Integers(codes, 4, group, scale, zero), source.dtype)


def _fast_order(columns: int) -> Tensor:
    """The column that is at each place of a row before rows are interleaved."""
    inside = (
        torch.arange(32).view(4, 4, 2).transpose(0, 1).reshape(4, 4, 2).transpose(1, 2).reshape(32)
    )
    return (torch.arange(0, columns, 32)[:, None] + inside).reshape(-1)


def _unpack_fast(packed: Tensor) -> Tensor:
    """Codes (N, K) of int16 (N / 4, K)."""
    rows, columns = packed.shape
    lanes = torch.stack([(packed >> (4 * i)) & 15 for i in range(4)], -1).to(torch.uint8)
    blocks = lanes.view(rows, columns // 64, 4, 64).transpose(1, 2).reshape(4 * rows, columns)
    return blocks[:, _fast_order(columns).argsort()]


def _pack_fast(codes: Tensor) -> Tensor:
    n, columns = codes.shape
    blocks = codes[:, _fast_order(columns)].view(n // 4, 4, columns // 64, 64).transpose(1, 2)
    lanes = blocks.reshape(n // 4, columns, 4).to(torch.int16)
    packed = lanes[..., 0].clone()
    for i in range(1, 4):
        packed |= lanes[..., i] << (4 * i)
    return packed


def _gemv_fast(source: Source, name: str) -> QTensor:
    (rows, columns), (padded, n) = (
        source.forms[f"{name}.{each}"][1] for each in ("qweight", "scales")
    )
    if columns % 64 or n != 4 * rows:
        raise CheckpointError(
            f"{name}: {n} outputs and {columns} inputs are not of the layout gemv_fast"
        )
    group = _group(source, name, columns, padded)
    groups = -(-columns // group)
    scale, low = (
        source.take(f"{name}.{each}")[:groups].t().contiguous() for each in ("scales", "qzeros")
    )
    spec = Spec("uint4", (1, group), str(scale.dtype).removeprefix("torch."), "offset", "packed")
    codes = _unpack_fast(source.take(f"{name}.qweight"))
    return assemble(codes, spec, (n, columns), source.dtype, scale, -low)


_MAKE = {"gemm": _gemm, "gemv": _gemv, "gemv_fast": _gemv_fast}


def read_gemm(source: Source, kind: str = "gemm") -> Reading:
    """Every module in a layout of AWQ."""
    label = str(source.quantization.get("version", kind)).lower()
    modules = _modules(source, kind)
    weights = {
        f"{name}.weight": ForeignWeight(
            tuple(f"{name}.{part}" for part in _PARTS),
            partial(_MAKE[kind], source, name),
            {"bits": 4},
        )
        for name in modules
    }
    note = f"the label says version={label!r}, and tensors are in the layout {kind}"
    return Reading(weights, notes=() if label == kind or not modules else (note,))


def _padded_groups(columns: int, group: int) -> int:
    """Groups that gemv and gemv_fast have room for."""
    multiple = {64: 2, 32: 4}.get(group, 1)
    width = -(-(columns // group) // 8)
    return 8 * -(-width // multiple) * multiple


def write_gemm(
    name: str, tensor: QTensor, settings: Mapping[str, Any], kind: str = "gemm"
) -> Written:
    """The tensors of one module in a layout of AWQ."""
    n, columns = tensor.shape if tensor.dim() == 2 else (0, 0)
    fast = kind == "gemv_fast"
    if n % 8 or columns % 64 or not n:
        raise QuantizationError(
            f"{name} of shape {tuple(tensor.shape)}: AWQ needs outputs in 8 and inputs in 64"
        )
    groups = (64, 128, 32) if kind != "gemm" else ()
    if fast and tensor.canonical().spec.zero_point == "offset":
        codes, scale, low = _offsets(tensor)
        group = tensor.spec.block[-1]
    else:
        found = integers_on(tensor, (4,), whole=kind == "gemm", groups=groups)
        codes, scale, group, zeros = found.codes, found.scale, found.group, found.zeros
        low = -(zeros * scale.float()).half() if fast else zeros.to(torch.uint8)
    if columns % group:
        raise QuantizationError(f"{name}: groups of {group} do not divide {columns} inputs")
    owner = name.removesuffix(".weight")
    if kind == "gemm":
        parts = [pack_words(reorder(each.t().contiguous(), AWQ_ORDER), 4) for each in (codes, low)]
        tensors = [*parts, scale.t().contiguous()]
    else:
        room = _padded_groups(columns, group) - scale.shape[1]
        scale, low = F.pad(scale, (0, room)), F.pad(low, (0, room))
        if fast:
            tensors = [_pack_fast(codes), low.t().contiguous(), scale.t().contiguous()]
        else:
            tensors = [pack_words(codes, 4), pack_words(low, 4), scale]
    used = {
        "bits": 4,
        "group_size": -1 if group == columns and kind == "gemm" else group,
        "version": kind,
    }
    return Written({f"{owner}.{part}": t for part, t in zip(_PARTS, tensors, strict=True)}, used)


def _offsets(tensor: QTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and negative offsets of a weight that was read from the layout gemv_fast."""
    base = tensor.canonical()
    codes, _, _ = base.layout_record.unpack(base.parts, base.spec, tuple(base.shape), base.format)
    if base.format.name != "uint4" or base.scale.dtype != torch.float16 or base.spec.block[0] != 1:
        raise QuantizationError(
            f"{tensor.spec} has offsets, and only float16 ones of uint4 are stored so"
        )
    return codes, base.scale, -base.zero_point


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    first = next(iter(settings.values()), {"bits": 4, "group_size": 128, "version": "gemm"})
    if other := next(
        (n for n, used in settings.items() if used["group_size"] != first["group_size"]), None
    ):
        raise QuantizationError(
            f"{other} has groups of {settings[other]['group_size']} and others of {first['group_size']}: AWQ "
            "has one size for all"
        )
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": first["group_size"],
        "zero_point": True,
        "version": first["version"],
        "modules_to_not_convert": list(dense) or None,
    }


def _detect(source: Source, kind: str) -> str:
    modules = _modules(source, kind)
    if quantized_by(source, AUTOROUND, "gptq"):
        return ""
    return (
        f"{len(modules)} modules have qweight, qzeros and scales in the layout {kind}"
        if modules
        else ""
    )


def _record(name: str, kind: str, doc: str) -> Interchange:
    return Interchange(
        name,
        partial(_detect, kind=kind),
        partial(read_gemm, kind=kind),
        partial(write_gemm, kind=kind),
        _config,
        doc,
    )


AWQ = _record("awq", "gemm", "AWQ of AutoAWQ, the layout gemm: 4 bits")
AWQ_GEMV = _record(
    "awq_gemv", "gemv", "AWQ of AutoAWQ, the layout gemv: 4 bits in groups of 32, 64 or 128"
)
AWQ_GEMV_FAST = _record(
    "awq_gemv_fast", "gemv_fast", "AWQ of llm-awq, the layout gemv_fast: 4 bits, scaled zeros"
)

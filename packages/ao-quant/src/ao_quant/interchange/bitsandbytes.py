"""bitsandbytes: NF4 and FP4 in blocks over the flattened weight, also with nested scales, and LLM.int8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import CheckpointError, QuantizationError, json_object, registry
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_core.ext.kernels import scale_values
from ao_core.ext.numerics import dynamic_values, unpack_bits
from ao_quant.dtypes import BNB_FP4
from ao_quant.interchange.integers import assemble, integers_of, rows_of
from ao_quant.interchange.naming import check_form, modules_with
from ao_quant.interchange.words import swap_nibbles

__all__ = ["BITSANDBYTES"]

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = {"nf4": "nf4", "fp4": "bnb_fp4"}
_NESTED = Spec("bnb_map8", (256,), "float32", "offset", "flat")
#: what int8 is divided by, as it is stored in their kernels
_INT8 = 7.874015718698502e-3
_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


def _map(kind: str) -> Tensor:
    """Value of each of their 16 codes."""
    if kind == "nf4":
        return registry.dtypes.get("nf4").decode(torch.arange(16, dtype=torch.uint8))
    signs = torch.tensor([1.0] * 8 + [-1.0] * 8)
    return torch.tensor(BNB_FP4 * 2) / 12 * signs


def _order(kind: str) -> Tensor:
    """The code of ao of each of their 16 codes."""
    return registry.dtypes.get(_KINDS[kind]).encode(_map(kind))


def _state(source: Source, name: str) -> tuple[str, dict[str, Any]]:
    """The kind of a module, and what its file says of it.

    Raises:
        CheckpointError: it is of no known kind, or the text is none.
    """
    kind = next((k for k in _KINDS if f"{name}.{_STATE}{k}" in source.forms), None)
    if kind is None:
        raise CheckpointError(f"{name} has an absmax and no quant_state of nf4 or fp4")
    full = f"{name}.{_STATE}{kind}"
    check_form(source, full, (torch.uint8,), (None,))
    try:
        state = json_object(bytes(source.take(full).tolist()).decode(), full)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{full} is no text: {error}") from error
    shape, size = state.get("shape"), state.get("blocksize")
    whole = (
        isinstance(shape, list) and len(shape) == 2 and all(type(s) is int and s > 0 for s in shape)
    )
    if not whole or type(size) is not int or size not in (32, *_SIZES):
        raise CheckpointError(
            f"{full}: shape={shape!r} and blocksize={size!r} are not those of a matrix"
        )
    return kind, state


def _four_bits(source: Source, name: str) -> QTensor:
    kind, state = _state(source, name)
    (n, k), size = state["shape"], state["blocksize"]
    stored = source.take(f"{name}.weight").reshape(-1).view(torch.uint8)
    blocks = -(-n * k // size)
    if 2 * stored.numel() != n * k + n * k % 2:
        raise CheckpointError(f"{name}: {stored.numel()} bytes for {n} × {k} elements of 4 bits")
    check_form(source, f"{name}.weight.quant_map", (torch.float32,), (16,))
    if not torch.equal(source.take(f"{name}.weight.quant_map"), _map(kind)):
        raise CheckpointError(f"{name}: quant_map is not that of {kind}")
    rows = k % size == 0
    codes = _order(kind)[unpack_bits(swap_nibbles(stored), 4, n * k).long()]
    scale = _absmax(source, name, state, blocks)
    if rows:
        codes = codes.view(n, k)
    if isinstance(scale, QTensor):
        grid = (n, k // size) if rows else (blocks,)
        scale = QTensor(scale.parts, _NESTED, grid, torch.float32)
    elif rows:
        scale = scale.view(n, k // size)
    held = _NESTED if isinstance(scale, QTensor) else "float32"
    spec = Spec(
        _KINDS[kind], (1, size) if rows else (size,), held, layout="packed" if rows else "flat"
    )
    dtype = getattr(torch, str(state.get("dtype")), None)
    dtype = dtype if dtype in (torch.float16, torch.bfloat16, torch.float32) else source.dtype
    return assemble(codes, spec, (n, k), dtype, scale)


def _absmax(source: Source, name: str, state: Mapping[str, Any], blocks: int) -> Tensor:
    """Scales of all blocks, in order: as they are, or a tensor of nested ones."""
    full = f"{name}.weight.absmax"
    if f"{name}.weight.nested_absmax" not in source.forms:
        check_form(source, full, (torch.float32,), (blocks,))
        return source.take(full)
    check_form(source, full, (torch.uint8,), (blocks,))
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    known = torch.tensor(dynamic_values(8, signed=True), dtype=torch.float32)
    if size != 256 or type(offset) not in (int, float):
        raise CheckpointError(
            f"{name}: nested_blocksize={size!r}, nested_offset={offset!r}; 256 and a number"
        )
    check_form(source, f"{name}.weight.nested_quant_map", (torch.float32,), (256,))
    if not torch.equal(source.take(f"{name}.weight.nested_quant_map"), known):
        raise CheckpointError(f"{name}: nested_quant_map is not that of bitsandbytes")
    check_form(source, f"{name}.weight.nested_absmax", (torch.float32,), (-(-blocks // 256),))
    scale = source.take(f"{name}.weight.nested_absmax")
    zero = torch.full_like(scale, -float(offset))  # type: ignore[arg-type]
    return assemble(source.take(full), _NESTED, (blocks,), torch.float32, scale, zero)


def _int8(source: Source, name: str) -> QTensor:
    shape = source.forms[f"{name}.weight"][1]
    check_form(source, f"{name}.weight", (torch.int8,), (None, None))
    check_form(source, f"{name}.SCB", (torch.float32,), (shape[0],))
    full = f"{name}.weight_format"
    if full in source.forms and int(source.take(full).reshape(-1)[:1].sum()) != 0:
        raise CheckpointError(
            f"{full} is not 0, which is by rows: the order of a kernel is not read"
        )
    scale = (source.take(f"{name}.SCB") * _INT8).view(-1, 1)
    parts = {"qdata": source.take(f"{name}.weight"), "scale": scale}
    return QTensor(parts, Spec("int8", (1, WHOLE)), shape, source.dtype)


def _read(source: Source) -> Reading:
    weights = {}
    for full in source.forms:
        name = full.removesuffix(".weight.absmax")
        if name != full and f"{name}.weight" in source.forms:
            names = tuple(
                n for n in source.forms if n == f"{name}.weight" or n.startswith(f"{name}.weight.")
            )
            weights[f"{name}.weight"] = ForeignWeight(names, partial(_four_bits, source, name))
    for name in modules_with(source, "weight", "SCB"):
        parts = ("weight", "SCB", "weight_format")
        names = tuple(f"{name}.{p}" for p in parts if f"{name}.{p}" in source.forms)
        weights[f"{name}.weight"] = ForeignWeight(
            names, partial(_int8, source, name), {"format": len(names) == 3}
        )
    return Reading(weights)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    """int8 by rows stays that; all else is 4 bits, NF4 unless it is FP4."""
    base, owner = rows_of(tensor), name.removesuffix(".weight")
    if base.dim() != 2:
        raise QuantizationError(f"{tuple(base.shape)} is no matrix, and others are not stored so")
    ints = integers_of(base)
    if (
        ints
        and ints.bits == 8
        and ints.zero is None
        and ints.perm is None
        and ints.scale.shape[1] == 1
    ):
        tensors = {
            f"{owner}.weight": (ints.codes ^ 128).view(torch.int8),
            f"{owner}.SCB": _scb(ints.scale),
        }
        if settings.get("format", True):
            tensors[f"{owner}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return Written(tensors, {"bits": 8})
    size = base.spec.block[-1]
    kind = next((k for k, name in _KINDS.items() if name == base.spec.dtype), None)
    rows = len(base.spec.block) == 2 and base.spec.block[0] == 1 and base.shape[1] % size == 0
    flat = base.spec.layout == "flat"
    if not kind or size not in (32, *_SIZES) or base.spec.input or not (rows or flat):
        spec = Spec("nf4", (64,), "float32", layout="flat")
        base, kind, size = quantize_tensor(base.dequantize(torch.float32), spec), "nf4", 64
    codes, scale, _ = base.layout_record.unpack(
        base.parts, base.spec, tuple(base.shape), base.format
    )
    lut = torch.zeros(16, dtype=torch.uint8)
    lut[_order(kind).flip(0).long()] = torch.arange(15, -1, -1, dtype=torch.uint8)
    theirs = lut[codes.reshape(-1).long()]
    theirs = torch.nn.functional.pad(theirs, (0, theirs.numel() % 2))
    packed = (theirs[::2] << 4) | theirs[1::2]
    state = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(base.shape),
    }
    tensors = {"": packed.view(-1, 1), ".quant_map": _map(kind)}
    if isinstance(scale, QTensor) and scale.spec == _NESTED and _one(scale.zero_point):
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": -float(scale.zero_point[0]),
        }
        tensors |= {
            ".absmax": scale.qdata.reshape(-1),
            ".nested_absmax": scale.scale.reshape(-1),
            ".nested_quant_map": torch.tensor(dynamic_values(8, signed=True), dtype=torch.float32),
        }
    else:
        values = scale_values(scale)
        assert values is not None
        tensors[".absmax"] = values.reshape(-1)
    tensors[f".quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    used = {"bits": 4, "kind": kind, "nested": ".nested_absmax" in tensors}
    return Written({f"{owner}.weight{part}": each for part, each in tensors.items()}, used)


def _one(zero: Tensor) -> bool:
    return bool(zero.numel()) and bool((zero == zero.reshape(-1)[0]).all())


def _scb(scale: Tensor) -> Tensor:
    """Their scale of a row whose product with the constant is this one, where there is one."""
    wanted = scale.float().reshape(-1)
    near = wanted / _INT8
    for other in (near.nextafter(torch.zeros(())), near.nextafter(torch.full((), torch.inf))):
        near = torch.where((near * _INT8 != wanted) & (other * _INT8 == wanted), other, near)
    return near


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    kinds = {(used["bits"], used.get("kind"), used.get("nested")) for used in settings.values()}
    if len(kinds) > 1:
        raise QuantizationError(
            "bitsandbytes has one kind of weight in a model: 8 bits, nf4 or fp4"
        )
    bits, kind, nested = kinds.pop() if kinds else (4, "nf4", False)
    config: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "llm_int8_skip_modules": list(dense) or None,
    }
    four = {
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": bool(nested),
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
    }
    return config | (four if bits == 4 else {"llm_int8_threshold": 6.0})


def _detect(source: Source) -> str:
    states = sum(f".{_STATE}" in name for name in source.forms)
    eights = len(list(modules_with(source, "weight", "SCB")))
    return f"{states} quant_states and {eights} SCB" if states + eights else ""


BITSANDBYTES = Interchange(
    "bitsandbytes",
    _detect,
    _read,
    _write,
    _config,
    "bitsandbytes: NF4 and FP4, with nested scales, and int8 by rows",
)

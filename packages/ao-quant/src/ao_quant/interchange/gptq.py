"""GPTQ: codes packed along the inputs, zero points along the outputs, as AutoGPTQ and GPT-QModel write them.

W[n, k] = scales[g_idx[k], n] · (q[k, n] - z[g_idx[k], n]). Version 1 stores z - 1, version 2 z. Labels lie
about that, so the zero points themselves are asked where they can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext import CheckpointError
from ao_core.ext.interchange import ForeignWeight, Interchange, Reading, Source, Written
from ao_quant.interchange.integers import Integers, integers_on, tensor_of
from ao_quant.interchange.naming import AUTOROUND, check_form, modules_with, quantized_by, simple
from ao_quant.interchange.words import pack_words, runs, unpack_words, words

__all__ = ["GPTQ", "GPTQ_V2", "gptq_modules", "order_of", "read_gptq", "write_gptq"]

BITS = (2, 3, 4, 8)
#: so many equal zero points are those of a symmetric weight
_MANY = 256
_INT, _FLOATS = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)
_NAMES = ("qweight", "qzeros", "scales")


def gptq_modules(source: Source) -> list[str]:
    """Modules whose codes are packed along the inputs: as many columns as scales."""
    forms = source.forms
    return [
        name
        for name in modules_with(source, *_NAMES)
        if forms[f"{name}.qweight"][0] == torch.int32
        and len(forms[f"{name}.qweight"][1]) == 2
        and forms[f"{name}.qweight"][1][-1:] == forms[f"{name}.scales"][1][-1:]
    ]


def _bits(source: Source, name: str) -> int:
    """Bits of a code, from the shapes alone where they tell, else from the label."""
    rows, n = source.forms[f"{name}.qweight"][1]
    stored = source.forms[f"{name}.qzeros"][1][-1:]
    columns = source.forms.get(f"{name}.g_idx", (None, (None,)))[1][0]
    fitting = [
        b for b in BITS if (words(n, b),) == stored and columns in (None, *_lengths(rows, b))
    ]
    label = source.quantization.get("bits")
    if len(fitting) != 1 and label not in fitting:
        raise CheckpointError(
            f"{name}: codes {[rows, n]} with zero points {list(source.forms[f'{name}.qzeros'][1])} are of "
            f"no number of bits among {BITS}, and the label says {label!r}"
        )
    return fitting[0] if len(fitting) == 1 else int(label)  # type: ignore[arg-type]


def _lengths(rows: int, bits: int) -> range:
    """How many codes fill so many words."""
    return range(32 * (rows - 1) // bits + 1, 32 * rows // bits + 1)


def _stored_zeros(source: Source, name: str, bits: int, n: int) -> Tensor:
    """Codes (N, G) of the zero points as they are stored."""
    return unpack_words(source.take(f"{name}.qzeros"), bits, n).t()


def _version(source: Source, modules: list[str]) -> tuple[int, str]:
    """Version 1 or 2, and a sentence where the label says otherwise."""
    label = str(
        source.quantization.get("checkpoint_format", source.quantization.get("format", "gptq"))
    )
    said = 2 if label == "gptq_v2" else 1
    if label not in ("gptq", "gptq_v2") and quantized_by(source, "gptq"):
        raise CheckpointError(f"checkpoint_format={label!r} is not known; gptq and gptq_v2 are")
    if not modules:
        return said, ""
    bits = _bits(source, modules[0])
    zeros = _stored_zeros(source, modules[0], bits, source.forms[f"{modules[0]}.scales"][1][1])
    middle = 1 << (bits - 1)
    uniform = bool(zeros.numel()) and bool((zeros == zeros[0, 0]).all())
    symmetric = source.quantization.get("sym") is True
    if symmetric and not uniform:
        return said, f"the label says sym=true, and the zero points of {modules[0]} differ"
    # a few equal zero points may be those of a small weight
    sure = uniform and (symmetric or zeros.numel() >= _MANY)
    found = {middle: 2, middle - 1: 1}.get(int(zeros[0, 0])) if sure else None
    if found is None or found == said:
        return said, ""
    return found, (
        f"the label says checkpoint_format={label!r}, and all zero points of {modules[0]} are stored as "
        f"{int(zeros[0, 0])}: the tensors are of version {found}"
    )


def order_of(g_idx: Tensor, groups: int) -> tuple[Tensor | None, int]:
    """How columns are sorted by groups, and the size of a group; None: they are already.

    Raises:
        CheckpointError: groups of different sizes, or an index beyond the last group.
    """
    columns = g_idx.numel()
    index = torch.where(g_idx < 0, g_idx + groups, g_idx).long()
    if columns and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"g_idx goes from {int(g_idx.min())} to {int(g_idx.max())}, of {groups} groups"
        )
    counts = torch.bincount(index, minlength=groups)
    group = int(counts[0]) if groups > 1 else max(columns, 1)
    if not group or -(-columns // group) != groups:
        raise CheckpointError(
            f"g_idx has {group} columns in its first group, and {groups} groups of {columns}"
        )
    even = torch.arange(columns) // group
    if torch.equal(index, even):
        return None, group
    perm = index.argsort(stable=True)
    if not torch.equal(index[perm], even):
        raise CheckpointError("g_idx has groups of different sizes, which no format of ao has")
    return perm, group


def _make(source: Source, name: str, bits: int, version: int) -> QTensor:
    """The tensor of one module."""
    (rows, n), (groups, _) = (source.forms[f"{name}.{each}"][1] for each in ("qweight", "scales"))
    check_form(source, f"{name}.qzeros", _INT, (groups, words(n, bits)))
    check_form(source, f"{name}.scales", _FLOATS, (groups, n))
    if f"{name}.g_idx" in source.forms:
        check_form(source, f"{name}.g_idx", (torch.int32, torch.int64), (None,))
        perm, group = order_of(source.take(f"{name}.g_idx"), groups)
        columns = source.forms[f"{name}.g_idx"][1][0]
    else:
        columns, perm = 32 * rows // bits, None
        label = source.quantization.get("group_size")
        even = isinstance(label, int) and label > 0 and -(-columns // label) == groups
        group = int(label) if even else -(-columns // max(groups, 1))  # type: ignore[arg-type]
    if words(columns, bits) != rows or -(-columns // group) != groups:
        raise CheckpointError(
            f"{name}: {rows} rows of words and {groups} groups do not fit {columns} inputs"
        )
    stored = _stored_zeros(source, name, bits, n).to(torch.int16)
    zeros = stored + (1 if version == 1 else 0)
    if int(zeros.max()) > 255:
        raise CheckpointError(f"{name}: a zero point of 256, which version 1 cannot tell from 0")
    codes = torch.empty((n, columns), dtype=torch.uint8)
    packed = source.take(f"{name}.qweight")
    for run in runs(n, columns):
        these = unpack_words(packed[:, run].t(), bits, columns)
        codes[run] = these if perm is None else these[:, perm]
    del packed
    scale = source.take(f"{name}.scales").t().contiguous()
    return tensor_of(Integers(codes, bits, group, scale, zeros, perm), source.dtype, own=True)


def read_gptq(source: Source) -> Reading:
    """Every module with packed codes, scales and zero points."""
    modules = gptq_modules(source)
    version, note = _version(source, modules)
    weights = {}
    for name in modules:
        bits = _bits(source, name)
        parts = (*_NAMES, "g_idx") if f"{name}.g_idx" in source.forms else _NAMES
        settings = {
            "bits": bits,
            "version": version,
            "g_idx": "g_idx" in parts,
            "group_size": source.quantization.get("group_size"),
        }
        weights[f"{name}.weight"] = ForeignWeight(
            tuple(f"{name}.{part}" for part in parts),
            partial(_make, source, name, bits, version),
            settings,
        )
    return Reading(weights, notes=(note,) if note else ())


def write_gptq(
    name: str, tensor: QTensor, settings: Mapping[str, Any], *, version: int = 1
) -> Written:
    """The tensors of one module; by default in the version given, with g_idx."""
    version = int(settings.get("version", version))
    bits = (int(settings["bits"]),) if "bits" in settings else BITS
    found = integers_on(tensor, bits, scale=_FLOATS[:1], permuted=True)
    owner, columns = name.removesuffix(".weight"), tensor.shape[1]
    notes = []
    if version == 1 and bool((found.zeros == 0).any()):
        notes.append(
            "version 1 has no zero point of 0: codes and zero points of such groups are one higher"
        )
        found = _lifted(found)
    stored = found.zeros - (1 if version == 1 else 0)
    places = torch.arange(columns)
    g_idx = (places // found.group).to(torch.int32)
    back = None if found.perm is None else found.perm.argsort()
    if back is not None:
        g_idx = g_idx[back]
    packed = torch.empty((words(columns, found.bits), tensor.shape[0]), dtype=torch.int32)
    for run in runs(tensor.shape[0], columns):
        codes = found.codes[run] if back is None else found.codes[run][:, back]
        packed[:, run] = pack_words(codes, found.bits).t()
    tensors = {
        f"{owner}.qweight": packed,
        f"{owner}.qzeros": pack_words(stored.t().to(torch.uint8).contiguous(), found.bits),
        f"{owner}.scales": found.scale.t().contiguous(),
        f"{owner}.g_idx": g_idx,
    }
    if settings.get("g_idx") is False and found.perm is None:
        del tensors[f"{owner}.g_idx"]
    whole = found.group >= columns
    used = {
        "bits": found.bits,
        "group_size": -1 if whole else found.group,
        "sym": found.zero is None,
        "desc_act": found.perm is not None,
        "version": version,
    }
    return Written(tensors, used, tuple(notes))


def _lifted(found: Integers) -> Integers:
    """The same with zero points of at least 1; the greatest code stays where it was 2**bits - 1."""
    lift = (found.zeros == 0).to(torch.int16)
    each = lift.repeat_interleave(found.group, 1)[:, : found.codes.shape[1]]
    codes = (found.codes + each).clamp(max=(1 << found.bits) - 1).to(torch.uint8)
    return found._replace(codes=codes, zero=found.zeros + lift)


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    """One entry for all, and `dynamic` overrides for modules that differ from the first."""
    shared = ("bits", "group_size", "sym", "desc_act")
    first = next(
        iter(settings.values()),
        {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "version": 1},
    )
    dynamic: dict[str, Any] = {f"-:{simple(name)}": {} for name in dense}
    for name, used in settings.items():
        if any(used[key] != first[key] for key in shared):
            dynamic[f"+:{simple(name.removesuffix('.weight'))}"] = {
                key: used[key] for key in shared
            }
    config = {key: first[key] for key in shared} | {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if first["version"] == 1 else "gptq_v2",
        "pack_dtype": "int32",
        "lm_head": any(name == "lm_head.weight" for name in settings),
        "true_sequential": True,
        "static_groups": False,
    }
    return config | ({"dynamic": dynamic} if dynamic else {})


def _detect(source: Source, version: int) -> str:
    modules = gptq_modules(source)
    if quantized_by(source, AUTOROUND, "awq"):
        return ""
    if not modules or _version(source, modules)[0] != version:
        return ""
    return f"{len(modules)} modules have qweight, qzeros and scales with codes along the inputs"


GPTQ = Interchange(
    "gptq",
    partial(_detect, version=1),
    read_gptq,
    write_gptq,
    _config,
    "GPTQ of AutoGPTQ and GPT-QModel, version 1 (zero points less 1): 2, 3, 4 and 8 bits, with g_idx",
)
GPTQ_V2 = Interchange(
    "gptq_v2",
    partial(_detect, version=2),
    read_gptq,
    partial(write_gptq, version=2),
    _config,
    "GPTQ of GPT-QModel, version 2: as version 1, with zero points as they are",
)

"""GGUF files as folders of transformers: names of tensors, order of rows, config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext import CheckpointError, json_object
from ao_core.ext.interchange import Container, Source
from ao_core.ext.saving import read_text
from ao_quant.configs.gguf import FILE_TYPES
from ao_quant.gguf.blocks import block_size
from ao_quant.gguf.configuration import (
    FREQUENCIES,
    check_architecture,
    config_of,
    frequencies_of,
    metadata_of,
)
from ao_quant.gguf.names import Place, places
from ao_quant.gguf.read import DENSE, GGUFHeader, mapped_tensors, read_gguf_header
from ao_quant.gguf.write import Info, write_whole
from ao_quant.interchange.gguf_tokens import tokenizer_metadata

__all__ = ["CONTAINER"]

#: experts: tensor in the file, of all of them -> matrix of each in the files of transformers
_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_ONE = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_ROUTER = (r"blk\.(\d+)\.ffn_gate_inp\.weight", "model.layers.{}.block_sparse_moe.gate.weight")


class Part(NamedTuple):
    """A tensor as a folder of transformers has it, within one of a file."""

    file: str
    place: Place
    #: which of a stack it is; None: it is all of it
    expert: int | None = None


def _parts(header: GGUFHeader) -> dict[str, Part]:
    """By the names of transformers."""
    found, others = {}, []
    for name, info in header.tensors.items():
        stack, router = _STACK.fullmatch(name), re.fullmatch(_ROUTER[0], name)
        if stack and len(info.shape) == 3:
            layer, matrix = stack[1], _EXPERTS[stack[2]]
            for expert in range(info.shape[0]):
                one = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                found[one] = Part(name, Place(name, one), expert)
        elif router:
            found[_ROUTER[1].format(router[1])] = Part(name, Place(name, name))
        else:
            others.append(name)
    placed = places("transformers", others, header.metadata)
    return found | {each.model: Part(name, each) for name, each in placed.items()}


def _row_bytes(kind: str, columns: int) -> int:
    elements, size = block_size(kind)
    return columns // elements * size


def _open(path: Path) -> Source:
    header = read_gguf_header(path)
    check_architecture(path, header)
    memory, parts = mapped_tensors(path), _parts(header)
    computed = parts.pop(FREQUENCIES, None)
    frequencies = None if computed is None else memory[FREQUENCIES].float()
    forms, types = {}, {}
    for name, part in parts.items():
        kind, shape = header.tensors[part.file]
        shape = shape if part.expert is None else shape[1:]
        if kind in FILE_TYPES:
            forms[name] = (torch.uint8, (*shape[:-1], _row_bytes(kind, shape[-1])))
            types[name] = kind
        else:
            forms[name] = (torch.float32 if part.place.added else DENSE[kind.upper()], shape)

    def take(name: str) -> Tensor:
        part = parts[name]
        rows = memory[part.file] if part.expert is None else memory[part.file][part.expert]
        rows = part.place.read(rows)
        added = part.place.added if name not in types else 0.0
        return rows.float() - added if added else rows.clone()

    label = {"quant_method": "gguf", **_scalars(header.metadata)}
    fields = {"dtype": "bfloat16", **config_of(path, header, frequencies)}
    return Source(forms, take, fields, label, {"types": json.dumps(types)})


def _scalars(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of the metadata is a number or a text."""
    plain = {k: v.item() if getattr(v, "ndim", None) == 0 else v for k, v in metadata.items()}
    return {k: v for k, v in plain.items() if isinstance(v, (str, int, float, bool))}


def _kept(folder: Path) -> dict[str, Any]:
    """What the file said from which a folder was made, and which config.json has no place for."""
    report = folder / "ao_interchange.json"
    if not report.is_file():
        return {}
    label = json_object(read_text(str(report)), report.name).get("label")
    if not isinstance(label, Mapping) or label.get("quant_method") != "gguf":
        return {}
    own = ("general.architecture", "general.file_type", "general.quantization_version")
    begins = ("general.", "tokenizer.ggml.")
    return {k: v for k, v in label.items() if k.startswith(begins) and k not in own}


class Entry(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int
    read: Callable[[], Tensor]


def _entries(
    source: Source, settings: Mapping[str, Mapping[str, Any]], metadata: dict[str, Any]
) -> list[Entry]:
    """What is written, in the order of the source; matrices of experts together."""
    stacks: dict[str, dict[int, str]] = {}
    entries: list[Entry] = []
    router = re.compile(_ROUTER[1].replace(".", r"\.").replace("{}", r"(\d+)"))
    for name in source.forms:
        if one := _ONE.fullmatch(name):
            matrix = next(key for key, value in _EXPERTS.items() if value == one[3])
            stack = f"blk.{one[1]}.ffn_{matrix}_exps.weight"
            stacks.setdefault(stack, {})[int(one[2])] = name
        elif found := router.fullmatch(name):
            file = f"blk.{found[1]}.ffn_gate_inp.weight"
            entries.append(_entry(source, settings, name, Place(file, name), float32=True))
        else:
            place = places("transformers", [name], metadata)[name]
            float32 = len(source.forms[name][1]) == 1 or place.file.endswith("norm.weight")
            entries.append(_entry(source, settings, name, place, float32=float32))
    for stack, members in stacks.items():
        entries.append(_stacked(stack, [members[i] for i in sorted(members)], source, settings))
    return entries


def _stacked(
    stack: str, names: list[str], source: Source, settings: Mapping[str, Mapping[str, Any]]
) -> Entry:
    each = [_entry(source, settings, name, Place(stack, name), float32=False) for name in names]
    if len({(one.kind, one.shape) for one in each}) > 1:
        raise CheckpointError(
            f"{stack}: experts are of several types or shapes, and GGUF has one for all"
        )
    shape = (len(each), *each[0].shape)
    nbytes = sum(one.nbytes for one in each)
    return Entry(stack, shape, each[0].kind, nbytes, lambda: torch.stack([e.read() for e in each]))


def _entry(
    source: Source,
    settings: Mapping[str, Mapping[str, Any]],
    name: str,
    place: Place,
    *,
    float32: bool,
) -> Entry:
    dtype, shape = source.forms[name]
    kind = str(settings[name]["type"]) if name in settings else ""
    if kind:
        elements, size = block_size(kind)
        shape = (*shape[:-1], shape[-1] // size * elements)
    read = partial(_read_rows, source, name, place, to_float=float32 and not kind)
    if not kind:
        dtype = torch.float32 if float32 or place.added else dtype
        kind = next((k for k, of in DENSE.items() if of == dtype), "")
    if not kind:
        raise CheckpointError(f"{name} is {dtype}, which GGUF does not hold")
    elements, size = (1, DENSE[kind].itemsize) if kind in DENSE else block_size(kind)
    return Entry(place.file, shape, kind.upper(), prod(shape) // elements * size, read)


def _read_rows(source: Source, name: str, place: Place, *, to_float: bool) -> Tensor:
    rows = place.write(source.take(name))
    return rows.float() + place.added if to_float or place.added else rows


def _write(
    path: Path, source: Source, settings: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    metadata = metadata_of(source.config) | tokenizer_metadata(folder, source.config)
    metadata |= _kept(folder)
    entries = _entries(source, settings, metadata)
    if (factors := frequencies_of(source.config)) is not None:
        entries.append(
            Entry(FREQUENCIES, tuple(factors.shape), "F32", factors.nbytes, lambda: factors)
        )
    infos = [Info(entry.name, entry.shape, entry.kind, entry.nbytes) for entry in entries]
    data = (entry.read().contiguous().reshape(-1).view(torch.uint8) for entry in entries)
    write_whole(path, metadata, infos, data)


def _unpack(path: Path, place: Path) -> tuple[str, ...]:
    """Write the tokenizer of a file as transformers reads it."""
    if find_spec("transformers") is None:
        return ("no tokenizer is written, for which transformers must be installed",)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.save_pretrained(place)
    except Exception as error:  # of whatever the metadata lead to
        return (
            f"no tokenizer is written: {type(error).__name__}: {' '.join(str(error).split())[:120]}",
        )
    return ()


CONTAINER = Container(".gguf", _open, _write, _unpack)

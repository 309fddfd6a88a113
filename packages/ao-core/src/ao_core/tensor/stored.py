"""What a checkpoint holds: records of quantized tensors around the plain tensors of safetensors files.

A quantized tensor `w` is stored as its parts `w.qdata`, `w.scale`, … (nested: `w.scale.qdata`), and as
a record in the metadata of the file that has them. Layouts in a checkpoint are canonical ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata as distributions
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ao_core.__about__ import __version__
from ao_core.errors import AoError, CheckpointError, UnknownNameError
from ao_core.registry import CORE, IN_PROCESS, registry
from ao_core.spec import Spec
from ao_core.tensor.create import encode_parts
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import native
from ao_core.tensor.shards import stored_form

__all__ = [
    "FORMAT_VERSION",
    "Form",
    "Header",
    "Provider",
    "Record",
    "dtype_of",
    "flat_to_state_dict",
    "flatten",
    "header_of",
    "parse_header",
    "providers_of",
    "rebuild",
    "restore",
    "state_dict_to_flat",
    "untie",
]

#: of the header; a reader accepts its own version and older ones
FORMAT_VERSION = 1

#: dtype and shape of a plain tensor
Form = tuple[torch.dtype, tuple[int, ...]]
Record = dict[str, Any]


@dataclass(frozen=True)
class Provider:
    """A registered name that a checkpoint needs, and the distribution that had it when it was saved."""

    #: "dtype" or "layout"
    kind: str
    name: str
    dist: str
    version: str

    def missing(self) -> str | None:
        """None, or a sentence that says what to install."""
        table = registry.dtypes if self.kind == "dtype" else registry.layouts
        if self.name in table:
            return None
        thing = f"the {self.kind} {self.name!r}"
        if self.dist == IN_PROCESS:
            return f"{thing}, which the program that saved it added with ao_core.register; do so first"
        release = f"{self.dist} {self.version}".strip()
        if self.dist == CORE:
            return f"{thing} of {release}, and this is ao-core {__version__}; upgrade ao-core"
        notes = "".join(f" {note}" for note in registry.notes())
        return f"{thing} of {release}; install it: pip install {self.dist}.{notes}"


# -- one tensor ----------------------------------------------------------------------------------


def flatten(fqn: str, tensor: Tensor) -> tuple[dict[str, Tensor], Record | None]:
    """The plain tensors that a parameter or buffer is stored as, and its record if it is quantized.

    Raises:
        CheckpointError: a kind of tensor that a checkpoint cannot hold.
    """
    tensor = tensor.detach() if not is_lazy(tensor) else tensor
    tensor = getattr(tensor, "hp", tensor)
    if isinstance(tensor, QTensor):
        tensor = _canonical(tensor)
        _check_plain(fqn, next(tensor.leaves())[1])
        return {f"{fqn}.{name}": leaf for name, leaf in tensor.leaves()}, _record(tensor)
    _check_plain(fqn, tensor)
    return {fqn: tensor}, None


def _check_plain(fqn: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta" or is_lazy(tensor):
        raise CheckpointError(f"{fqn} has no values (it is lazy or on the meta device); load them first")
    if is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        raise CheckpointError(
            f"{fqn} is a {kind}, which cannot be saved here; gather or convert it to a plain tensor first"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{fqn} is a {tensor.layout} tensor of {tensor.dtype}; only dense ones can be saved"
        )


def _canonical(tensor: QTensor) -> QTensor:
    parts = tensor.canonical().parts
    nested = {n: _canonical(p) if isinstance(p, QTensor) else p for n, p in parts.items()}
    return tensor.canonical().like(nested)


def _record(tensor: QTensor) -> Record:
    record: Record = {
        "spec": tensor.spec.to_dict(),
        "shape": list(tensor.shape),
        "dtype": _dtype_name(tensor.dtype),
        "parts": {n: _record(p) if isinstance(p, QTensor) else None for n, p in tensor.parts.items()},
    }
    if tensor.is_permuted:
        record["order"] = list(tensor.order)
        record["flat_from"] = None if tensor.flat_from is None else list(tensor.flat_from)
    return record


def rebuild(fqn: str, record: Record, take: Callable[[str], Tensor]) -> QTensor:
    """Inverse of `flatten` for a quantized tensor; `take` gives a plain tensor by name.

    Raises:
        CheckpointError: the parts do not fit the record.
    """
    parts: dict[str, Tensor] = {}
    for name, nested in record["parts"].items():
        part = f"{fqn}.{name}"
        parts[name] = take(part) if nested is None else rebuild(part, nested, take)
    flat_from = record.get("flat_from")
    tensor = QTensor(
        parts,
        Spec.from_dict(record["spec"]),
        tuple(record["shape"]),
        dtype_of(record["dtype"]),
        order=tuple(record["order"]) if "order" in record else None,
        flat_from=None if flat_from is None else tuple(flat_from),
    )
    expected = _part_shapes(tensor.spec, tensor.stored_shape)
    for name, part_tensor in parts.items():
        if expected.get(name, tuple(part_tensor.shape)) != tuple(part_tensor.shape):
            raise CheckpointError(
                f"{fqn}.{name} has the shape {tuple(part_tensor.shape)}, and "
                f"{tensor.spec} of {tensor.stored_shape} needs {expected[name]}"
            )
    return tensor


@lru_cache(maxsize=256)
def _part_shapes(spec: Spec, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of the parts of such a tensor; kernels rely on them and files may come from anyone."""
    try:
        parts = encode_parts(torch.empty(shape, device="meta"), spec)
    except UnknownNameError:
        raise
    except Exception:  # the encoder of a plugin need not run without values
        return {}
    return {name: tuple(part.shape) for name, part in parts.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is not one of torch {torch.__version__}")
    return dtype


def restore(stored: Tensor, form: Form | None) -> Tensor:
    """Inverse of storing a tensor as `stored_form` says; without a form it is stored as it is."""
    return stored if form is None else stored.view(form[0]).reshape(form[1])


# -- the header ----------------------------------------------------------------------------------


def header_of(
    records: Mapping[str, Record],
    ties: Mapping[str, str],
    forms: Mapping[str, Form],
    crcs: Mapping[str, str],
) -> dict[str, str]:
    """The metadata of a file.

    Args:
        records: of the quantized tensors, by name.
        ties: names that stand for another name's tensor.
        forms: of all plain tensors in the file.
        crcs: checksums of the plain tensors; may be empty.
    """
    raw = {
        name: {"dtype": _dtype_name(form[0]), "shape": list(form[1])}
        for name, form in forms.items()
        if stored_form(*form) != form
    }
    header = {
        "version": FORMAT_VERSION,
        "ao_core": __version__,
        "tensors": dict(records),
        "ties": dict(ties),
        "raw": raw,
        "crc32": dict(crcs),
        "providers": [vars(provider) for provider in providers_of(records.values())],
    }
    return {"format": "pt", "ao": json.dumps(header, separators=(",", ":"))}


@dataclass(frozen=True)
class Header:
    """`header_of`, read back."""

    records: dict[str, Record]
    ties: dict[str, str]
    raw: dict[str, Form]
    crcs: dict[str, str]
    providers: tuple[Provider, ...]


def parse_header(metadata: Mapping[str, str]) -> Header:
    """Read the metadata of a file; of one that ao did not write, an empty header.

    Raises:
        CheckpointError: it is of a newer version, or malformed.
    """
    if "ao" not in metadata:
        return Header({}, {}, {}, {}, ())
    try:
        data = json.loads(metadata["ao"])
        if data["version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"format version {data['version']}, written by ao-core {data.get('ao_core')}; this "
                f"ao-core ({__version__}) reads up to {FORMAT_VERSION}. Upgrade ao-core"
            )
        for record in data["tensors"].values():
            _check_record(record)
        return Header(
            records=data["tensors"],
            ties=data["ties"],
            raw={n: (dtype_of(f["dtype"]), tuple(f["shape"])) for n, f in data["raw"].items()},
            crcs=data["crc32"],
            providers=tuple(Provider(**provider) for provider in data["providers"]),
        )
    except CheckpointError:
        raise
    except (AoError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of ao is malformed: {error!r}") from error


def _check_record(record: Record) -> None:
    Spec.from_dict(record["spec"])
    dtype_of(record["dtype"])
    if sorted(record.get("order", range(len(record["shape"])))) != list(range(len(record["shape"]))):
        raise ValueError(f"order={record['order']} is no permutation of the dimensions")
    if record.get("flat_from") and [prod(record["flat_from"])] != record["shape"]:
        raise ValueError(f"flat_from={record['flat_from']} does not flatten to {record['shape']}")
    for nested in record["parts"].values():
        if nested is not None:
            _check_record(nested)


def providers_of(records: Iterable[Record]) -> list[Provider]:
    """Who provides the number formats and layouts of the records, sorted."""
    names: set[tuple[str, str]] = set()
    for record in records:
        names.update(_names(record))
    found = []
    for kind, name in sorted(names):
        dist = (registry.dtypes if kind == "dtype" else registry.layouts).provider(name)
        found.append(Provider(kind, name, dist, _version(dist)))
    return found


def _names(record: Record) -> Iterator[tuple[str, str]]:
    """(kind, name) of all that a record needs from the registry."""
    spec: Spec | None = Spec.from_dict(record["spec"])
    while spec is not None:
        yield from (("dtype", spec.dtype), ("layout", spec.layout))
        spec = spec.act
    for nested in record["parts"].values():
        if nested is not None:
            yield from _names(nested)


def _version(dist: str) -> str:
    if dist == CORE:
        return __version__
    try:
        return distributions.version(dist)
    except distributions.PackageNotFoundError:
        return ""


# -- state dicts ---------------------------------------------------------------------------------


def untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without those that are the memory of an earlier one, and {name left out: kept}."""
    first: dict[Any, str] = {}
    kept, ties = {}, {}
    for name, tensor in tensors.items():
        owner = first.setdefault(_identity(tensor), name)
        if owner == name:
            kept[name] = tensor
        else:
            ties[name] = owner
    return kept, ties


def _identity(tensor: Tensor) -> Any:
    """Equal for two tensors that are the same memory, seen in the same way."""
    tensor = getattr(tensor, "hp", tensor)
    if isinstance(tensor, QTensor):
        parts = tuple(_identity(leaf) for _, leaf in tensor.leaves())
        return parts, tensor.spec, tuple(tensor.shape), tensor.order, tensor.dtype
    if is_traceable_wrapper_subclass(tensor) or tensor.is_meta or is_lazy(tensor):
        return id(tensor)
    if tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    place = (tensor.device, tensor.data_ptr(), tensor.dtype)
    return *place, tuple(tensor.shape), tensor.stride()


def state_dict_to_flat(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors and text metadata that any writer of safetensors files takes.

    Raises:
        CheckpointError: a value that is no tensor, or of a kind that cannot be saved.
    """
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}; a checkpoint holds tensors only (no pickle)"
            )
    kept, ties = untie(state_dict)
    flat: dict[str, Tensor] = {}
    records: dict[str, Record] = {}
    forms: dict[str, Form] = {}
    for name, tensor in kept.items():
        leaves, record = flatten(name, tensor)
        if record is not None:
            records[name] = record
        for leaf, plain in leaves.items():
            if leaf in flat:
                raise CheckpointError(f"two tensors would be stored as {leaf!r}; rename {name!r}")
            forms[leaf] = (plain.dtype, tuple(plain.shape))
            stored = stored_form(*forms[leaf])
            plain = plain.contiguous()
            flat[leaf] = plain if stored == forms[leaf] else plain.reshape(-1).view(stored[0])
            flat[leaf] = flat[leaf].reshape(stored[1])
    return flat, header_of(records, ties, forms, {})


def flat_to_state_dict(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, Tensor]:
    """Inverse of `state_dict_to_flat`; quantized tensors come in the layout of their device.

    Raises:
        CheckpointError: the metadata is malformed, a part or a plugin is missing.
    """
    header = parse_header(metadata)
    if missing := [text for p in header.providers if (text := p.missing())]:
        raise CheckpointError(f"the tensors need {'; and '.join(missing)}")
    left = {name: restore(tensor, header.raw.get(name)) for name, tensor in tensors.items()}
    out: dict[str, Tensor] = {}
    try:
        for name, record in header.records.items():
            out[name] = native(rebuild(name, record, left.pop))
        out |= left
        return out | {name: out[owner] for name, owner in header.ties.items()}
    except KeyError as error:
        raise CheckpointError(f"{error.args[0]!r} is missing among the tensors") from error

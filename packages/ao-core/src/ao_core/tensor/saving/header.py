"""The text that stands in the metadata of a safetensors file: records, ties, checksums, providers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata as distributions

import torch

from ao_core.__about__ import __version__
from ao_core.errors import AoError, CheckpointError
from ao_core.registry import CORE, IN_PROCESS, registry
from ao_core.schema import SHAPE, TEXT, Fields, Items, Number, Table, Text, check, parse_json
from ao_core.spec import Spec
from ao_core.tensor.saving.leaves import (
    RECORD,
    Record,
    check_record,
    dtype_name,
    dtype_of,
    spec_of,
)

__all__ = [
    "CRC32",
    "FORMAT_VERSION",
    "Form",
    "Header",
    "Provider",
    "header_of",
    "names_of",
    "parse_header",
    "providers_of",
]

#: of the header; a reader accepts its own version and older ones. Files of version 1 have no placeholders
FORMAT_VERSION = 2
#: eight hexadecimal digits
CRC32 = Text(r"[0-9a-f]{8}", "a CRC-32 in hexadecimal digits")
_VERSION = Fields({"version": Number(1, 1 << 31)}, {"ao_core": TEXT})
#: of both versions
_FIELDS = Fields(
    {
        "tensors": Table(RECORD),
        "ties": Table(TEXT),
        "raw": Table(Fields({"dtype": TEXT, "shape": SHAPE})),
        "crc32": Table(CRC32),
        "providers": Items(
            Fields(
                {
                    "kind": Text("dtype|layout", '"dtype" or "layout"'),
                    "name": TEXT,
                    "dist": TEXT,
                    "version": TEXT,
                }
            )
        ),
    }
)
#: dtype and shape of a plain tensor
Form = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Provider:
    """A registered name that a checkpoint needs, and the distribution it came from when saved."""

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
            return f"{thing}, which was added with ao_core.register in another program; do so here"
        release = f"{self.dist} {self.version}".strip()
        if self.dist == CORE:
            return f"{thing} of {release}, and this is ao-core {__version__}; upgrade ao-core"
        notes = "".join(f" {note}" for note in registry.notes())
        return f"{thing} of {release}; install it: pip install {self.dist}.{notes}"


def header_of(
    records: Mapping[str, Record],
    ties: Mapping[str, str],
    raw: Mapping[str, Form],
    crcs: Mapping[str, str],
) -> dict[str, str]:
    """The metadata of a file.

    Args:
        records: of the quantized tensors, by name.
        ties: names that stand for another name's tensor.
        raw: of the plain tensors that are stored as bytes.
        crcs: checksums of the plain tensors; may be empty.
    """
    header = {
        "version": FORMAT_VERSION,
        "ao_core": __version__,
        "tensors": dict(records),
        "ties": dict(ties),
        "raw": {n: {"dtype": dtype_name(d), "shape": list(s)} for n, (d, s) in raw.items()},
        "crc32": dict(crcs),
        "providers": [vars(provider) for provider in providers_of(records.values())],
    }
    text = json.dumps(header, separators=(",", ":"))
    return {"format": "pt", "ao": text, "ao_crc32": _crc32(text)}


@dataclass(frozen=True)
class Header:
    """`header_of`, read back."""

    records: dict[str, Record]
    ties: dict[str, str]
    raw: dict[str, Form]
    crcs: dict[str, str]
    providers: tuple[Provider, ...]
    #: of all that, and with it of the checksums of the tensors; None: ao did not write it
    crc32: str | None = None


def parse_header(metadata: Mapping[str, str]) -> Header:
    """Read the metadata of a file; of one that ao did not write, an empty header.

    Raises:
        CheckpointError: it is corrupted, malformed or of a newer version.
    """
    if not metadata.keys() & {"ao", "ao_crc32"}:
        return Header({}, {}, {}, {}, ())
    text = metadata.get("ao", "")
    if metadata.get("ao_crc32") != _crc32(text):
        raise CheckpointError("corrupted, the checksum of the header of ao is wrong")
    try:
        data = parse_json(text)
        check(data, _VERSION, "header")
        if data["version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"format version {data['version']}, written by ao-core {data.get('ao_core')}; this "
                f"ao-core ({__version__}) reads up to {FORMAT_VERSION}. Upgrade ao-core"
            )
        check(data, _FIELDS, "header")
        for name, record in data["tensors"].items():
            _check_record(name, record)
        return Header(
            records=data["tensors"],
            ties=data["ties"],
            raw={n: (dtype_of(f["dtype"]), tuple(f["shape"])) for n, f in data["raw"].items()},
            crcs=data["crc32"],
            providers=tuple(
                Provider(p["kind"], p["name"], p["dist"], p["version"]) for p in data["providers"]
            ),
            crc32=metadata["ao_crc32"],
        )
    except CheckpointError:
        raise
    except (AoError, ValueError) as error:
        raise CheckpointError(f"the header of ao is malformed: {error}") from error


def _check_record(name: str, record: Record) -> None:
    try:
        check_record(record)
    except (AoError, ValueError) as error:
        raise CheckpointError(
            f"the header of ao is malformed: header.tensors[{name!r}]: {error}"
        ) from error


def providers_of(records: Iterable[Record]) -> list[Provider]:
    """Who provides the number formats and layouts of the records, sorted."""
    names: set[tuple[str, str]] = set()
    for record in records:
        names.update(names_of(record))
    found = []
    for kind, name in sorted(names):
        dist = (registry.dtypes if kind == "dtype" else registry.layouts).provider(name)
        found.append(Provider(kind, name, dist, _version(dist)))
    return found


def names_of(record: Record) -> Iterator[tuple[str, str]]:
    """(kind, name) of all that a record needs from the registry."""
    spec: Spec | None = spec_of(record)
    while spec is not None:
        yield from (("dtype", spec.dtype), ("layout", spec.layout))
        spec = spec.act
    for nested in record["parts"].values():
        if nested is not None:
            yield from names_of(nested)


def _crc32(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _version(dist: str) -> str:
    if dist == CORE:
        return __version__
    try:
        return distributions.version(dist)
    except distributions.PackageNotFoundError:
        return ""

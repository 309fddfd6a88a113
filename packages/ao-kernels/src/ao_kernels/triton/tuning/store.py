"""What was measured once, on disk: a file a problem in the user's cache, and one a device in the package.

Imports no torch, so that caches can be looked at in no time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ao_core.ext import cache_folder

__all__ = [
    "SHIPPED",
    "Device",
    "Problem",
    "Record",
    "Store",
    "bucket",
    "cached",
    "clear",
    "digest",
    "exported",
    "read",
    "store_of",
]

_FORMAT = 1
_KERNELS = Path(__file__).parents[1]
#: measured by others, for known devices: `<device>.json`, as `python -m ao_kernels.tune export` writes it
SHIPPED = Path(__file__).parent / "shipped"
_log = logging.getLogger(__name__)


class Problem(NamedTuple):
    """All that the best setting depends on, beside the device."""

    #: the kernel
    family: str
    #: formats, dtypes, sizes of groups, …: words, numbers and dtypes
    facts: tuple[object, ...]
    n: int
    k: int
    #: rows of activations, or the power of two above
    m: int

    def __str__(self) -> str:
        facts = " ".join(str(fact).removeprefix("torch.") for fact in self.facts)
        return f"{self.family} {facts} n={self.n} k={self.k} m<={self.m}"


def bucket(m: int) -> int:
    """The power of two from m on: what is measured for one number of rows serves those beside it."""
    return 1 << max(m - 1, 0).bit_length()


class Device(NamedTuple):
    """A kind of device."""

    #: as its driver says, e.g. "NVIDIA H200"
    name: str
    #: compute capability times ten
    arch: int

    @property
    def slug(self) -> str:
        """The name of its files."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.name} sm {self.arch}".lower()).strip("-")


class Record(NamedTuple):
    """What one problem's settings took."""

    #: a `Problem` as text
    problem: str
    #: the one to use
    setting: dict[str, int]
    #: microseconds of each that was tried, as (setting, microseconds)
    tried: tuple[tuple[dict[str, int], float], ...] = ()
    #: those for which no time was left, and those that could not be launched
    untried: tuple[dict[str, int], ...] = ()
    failed: tuple[dict[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        tried = [{**setting, "microseconds": round(us, 3)} for setting, us in self.tried]
        return {**self._asdict(), "tried": tried}


class Store(NamedTuple):
    """Where what was measured on one kind of device is found, and kept."""

    device: Device
    #: the user's; its name has the versions that times depend on
    folder: Path
    shipped: Path = SHIPPED

    def find(self, problem: Problem) -> tuple[Record, str] | None:
        """What is known of a problem and from where, "cache" or "shipped"; None where nothing is."""
        record = read(self._file(problem))
        if record is not None and record.problem == str(problem):
            return record, "cache"
        record = _shipped(self.shipped, self.device).get(str(problem))
        return None if record is None else (record, "shipped")

    def keep(self, problem: Problem, record: Record) -> Record:
        """Keep a record; returns that of the process that came first, which is what all shall use.

        What cannot be written is a warning.
        """
        file = self._file(problem)
        unfinished = file.with_suffix(f".{secrets.token_hex(4)}")
        data = {"format": _FORMAT, "device": self.device._asdict(), "record": record.to_dict()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(data, indent=1), encoding="utf-8")
            try:
                os.link(unfinished, file)
            except OSError:  # there is one already, or the file system has no links
                if first := read(file):
                    return first
                os.replace(unfinished, file)
        except OSError as error:
            _log.warning("settings of kernels cannot be kept in %s: %s", self.folder, error)
        finally:
            with suppress(OSError):
                unfinished.unlink()
        return record

    def _file(self, problem: Problem) -> Path:
        return self.folder / f"{hashlib.sha256(str(problem).encode()).hexdigest()[:32]}.json"


def store_of(device: Device, triton_version: str) -> Store:
    """The user's cache, and what is shipped, for a device and this version of the kernels."""
    return Store(device, _root() / device.slug / f"triton-{triton_version}-{digest()}")


@cache
def digest() -> str:
    """Of the sources that kernels, and their PTX, are made from."""
    sources = sorted(
        path for path in _KERNELS.rglob("*.py") if path.parent != Path(__file__).parent
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def read(file: Path) -> Record | None:
    """The record in a file of the cache; None where there is none, with a warning if it is damaged."""
    found = _read(file)
    return found[1] if found else None


def _read(file: Path) -> tuple[Device, Record] | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        _check_format(data)
        return _device(data["device"]), _record(data["record"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be used, and is ignored: %s: %s", file, type(error).__name__, error)
        return None


def cached() -> Iterator[tuple[Device, str, Record]]:
    """Every record of the user's cache: of all devices, and of all versions, the second."""
    for file in sorted(_root().glob("*/*/*.json")):
        if found := _read(file):
            yield found[0], file.parent.name, found[1]


def clear() -> int:
    """Drop the user's cache, of every device and version; returns how many files that were."""
    files = [file for file in _root().glob("*/*/*") if file.is_file()]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def exported() -> dict[str, dict[str, Any]]:
    """What these versions of the kernels measured, by the file in which it would be shipped.

    Where several versions of Triton did, that of the last in the order of their names.
    """
    found: dict[tuple[Device, str], list[Record]] = {}
    for device, versions, record in cached():
        triton, _, sources = versions.removeprefix("triton-").rpartition("-")
        if sources == digest():
            found.setdefault((device, triton), []).append(record)
    return {
        f"{device.slug}.json": {
            "format": _FORMAT,
            "device": device._asdict(),
            "triton": triton,
            "kernels": digest(),
            "records": [record.to_dict() for record in sorted(records, key=str)],
        }
        for (device, triton), records in sorted(found.items())
    }


@cache
def _shipped(folder: Path, device: Device) -> Mapping[str, Record]:
    """Problem → record. Measured with kernels of then: a guess among settings that all work."""
    file = folder / f"{device.slug}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        _check_format(data)
        if _device(data["device"]) != device:
            raise ValueError(f"it is for {data['device']}, not {device}")
        return {record.problem: record for record in map(_record, data["records"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be used, and is ignored: %s: %s", file, type(error).__name__, error)
        return {}


def _root() -> Path:
    return cache_folder("triton")


def _check_format(data: Mapping[str, Any]) -> None:
    if data["format"] != _FORMAT:
        raise ValueError(f"format={data['format']!r} is not {_FORMAT}")


def _device(data: Mapping[str, Any]) -> Device:
    return Device(str(data["name"]), int(data["arch"]))


def _record(data: Mapping[str, Any]) -> Record:
    tried = []
    for each in data["tried"]:
        setting = dict(each)
        microseconds = float(setting.pop("microseconds"))
        tried.append((_setting(setting), microseconds))
    return Record(
        str(data["problem"]),
        _setting(data["setting"]),
        tuple(tried),
        tuple(map(_setting, data["untried"])),
        tuple(map(_setting, data["failed"])),
    )


def _setting(data: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(value) for name, value in data.items()}

"""Changes to the files of checkpoints, as an enemy or a failing disk makes them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["CHANGES", "VALUES", "json_change", "noise", "places", "special"]

#: a change of the files in a folder, and what it did; None: there is nothing that it could change
Change = Callable[[Path, random.Random], str | None]

#: values that no field expects, or that are at its ends
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 1 << 31, 1 << 47, 1 << 62, 1 << 70, 0.5, -0.0, 1e308, "", "x",
    "int8", "uint4", "nf4", "packed", "plain", "int4_cpu", "cpu_tiles", "bsr", "two_four", "flat", "float32",
    "float16", "bfloat16", "e8m0", "none", "int", "float", "offset", "uint8", "complex128", "Tensor",
    "load", "../../sentinel/secret", "/etc/passwd", "/dev/zero", "..", "a\x00b", "\ud800", "é" * 300,
    "model.safetensors", [], {}, [[]], [1], [1, 2], [-1], [0], [1 << 62, 1 << 62], ["x"], {"a": 1},
    {"dtype": "int8", "block": [1]},
    {"dtype": "int8", "block": [1, -1], "scale_dtype": "float32", "zero_point": "none", "layout": "plain"},
    [["scale_rule", "bogus"]], [["blocksize", 1 << 20]], [["blocksize", 16]], [["sparsity", "x"]],
)  # fmt: skip
#: texts in place of a JSON text
TEXTS = (
    b"", b"{", b"[]", b"3", b"null", b'"x"', b"{}", b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe",
    b"\x00" * 64,
    b'{"weight_map": {}, "files": {}}', b"[NaN]", b"[1e999]", b"9" * 6000, b'{"files": [], "weight_map": []}',
    b'{"files": {"a": {"bytes": 1e3, "sha256": "0"}}}', b"\xef\xbb\xbf{}",
)  # fmt: skip
#: files that may be of another kind
NAMES = (
    "model.safetensors", "model.safetensors.index.json", "config.json", "ao_manifest.json", "x.safetensors",
)  # fmt: skip
#: where links lead
LINKS = {
    "zero_point": "/dev/zero",
    "full": "/dev/full",
    "outside": "{outside}",
    "loop": "{itself}",
    "dangling": "nowhere",
}
#: dtypes of a safetensors file, and bytes of their elements
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "I64": 8,
    "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


# -- JSON ------------------------------------------------------------------------------------------


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in JSON data."""
    if path:
        yield path
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data if isinstance(data, list) else ())
    )
    for key, value in items:
        yield from places(value, (*path, key))


def changed(data: Any, rng: random.Random) -> str:
    """Change one place of JSON data; says which."""
    path = rng.choice(list(places(data)))
    at = data
    for key in path[:-1]:
        at = at[key]
    how, key = (
        rng.choice(("set", "set", "set", "remove", "add", "rename", "nest", "swap", "near")),
        path[-1],
    )
    old = at[key]
    if how == "remove":
        del at[key]
    elif how == "add" and isinstance(old, dict):
        old[
            rng.choice(
                ("x", "qdata", "zero_point", "__class__", "_bound", "spec", "../x", "\ud800")
            )
        ] = rng.choice(VALUES)
    elif how == "add" and isinstance(old, list):
        old.append(rng.choice(VALUES))
    elif how == "rename" and isinstance(at, dict):
        at[
            rng.choice(("x", "0.weight", "../x", "/dev/zero", "model.safetensors", "\ud800", ""))
        ] = at.pop(key)
    elif how == "nest":
        deep: Any = old
        for _ in range(rng.choice((1, 40, 500))):
            deep = rng.choice(([deep], {"act": deep}))
        at[key] = deep
    elif how == "swap" and isinstance(at, dict):
        other = rng.choice(list(at))
        at[key], at[other] = at[other], at[key]
    elif how == "near" and type(old) is int:
        at[key] = old + rng.choice((-1, 1, 2, -old, old, 1 << 20))
    else:
        at[key] = rng.choice(VALUES)
    return f"{how} {'.'.join(map(str, path))!r:.80}"


def json_change(name: str) -> Change:
    """A change of a file of JSON."""

    def change(folder: Path, rng: random.Random) -> str | None:
        path = folder / name
        if not path.is_file():
            return None
        if rng.random() < 0.15:
            path.write_bytes(text := rng.choice(TEXTS))
            return f"{name} = {text!r:.40}"
        text = path.read_text()
        if rng.random() < 0.1:
            at = rng.randrange(len(text))
            path.write_text(
                text[:at]
                + rng.choice(('{"a": 1, "a": 2}', "NaN", '"', "]", text[at:] * 2))
                + text[at:]
            )
            return f"{name}: other text at {at}"
        data = json.loads(text)
        what = "; ".join(
            changed(data, rng) for _ in range(rng.choice((1, 1, 1, 2, 4))) if list(places(data))
        )
        path.write_text(json.dumps(data))
        return f"{name}: {what}"

    return change


# -- headers of safetensors ------------------------------------------------------------------------


def tensor_files(folder: Path) -> list[Path]:
    """The files of tensors, those of unfinished work too."""
    found = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return sorted(p for p in found if p.suffix == ".safetensors" or p.name.isdecimal())


def parse(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a file, and the bytes of its tensors."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write(path: Path, header: dict[str, Any], body: bytes) -> None:
    """The inverse."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def sealed(header: dict[str, Any], ao: Any) -> None:
    """Put the text of ao in a header, with the checksum that belongs to it."""
    text = ao if isinstance(ao, str) else json.dumps(ao)
    header["__metadata__"]["ao"] = text
    header["__metadata__"]["ao_crc32"] = f"{zlib.crc32(text.encode()):08x}"


def ao_header(folder: Path, rng: random.Random) -> str | None:
    """A change of what ao says of tensors, sealed again."""
    files = [
        path for path in tensor_files(folder) if "ao" in parse(path)[0].get("__metadata__", {})
    ]
    if not files:
        return None
    path = rng.choice(files)
    header, body = parse(path)
    if rng.random() < 0.1:
        text = rng.choice(TEXTS).decode("latin1")
        sealed(header, text)
        write(path, header, body)
        return f"{path.name}: ao = {text!r:.40}"
    ao = json.loads(header["__metadata__"]["ao"])
    # mostly where parts are described
    what = changed(ao["tensors"] if rng.random() < 0.7 and ao.get("tensors") else ao, rng)
    if rng.random() < 0.5 and isinstance(ao, dict):
        ao["crc32"] = {}
    sealed(header, ao)
    write(path, header, body)
    return f"{path.name}: ao: {what}"


def dtypes_of_parts(folder: Path, rng: random.Random) -> str | None:
    """A tensor of another dtype or shape with as many bytes."""
    files = tensor_files(folder)
    if not files:
        return None
    path = rng.choice(files)
    header, body = parse(path)
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return None
    name = rng.choice(names)
    info = header[name]
    elements = 1
    for size in info["shape"]:
        elements *= size
    nbytes = elements * SIZES[info["dtype"]]
    code = rng.choice([code for code, size in SIZES.items() if nbytes % size == 0])
    if SIZES[code] != SIZES[info["dtype"]] or rng.random() < 0.2:
        count = nbytes // SIZES[code]
        empty = [[0, 1 << 60]] if not count else []
        info["shape"] = rng.choice(([count], [1, count], [count, 1], *empty))
    info["dtype"] = code
    if "ao" in header.get("__metadata__", {}):
        ao = json.loads(header["__metadata__"]["ao"])
        ao["crc32"] = {}
        if rng.random() < 0.2:
            ao["raw"][name] = {
                "dtype": rng.choice(("complex128", "bool", "qint8", "bits8", "float32")),
                "shape": [1],
            }
        sealed(header, ao)
    write(path, header, body)
    return f"{path.name}: {name} is {code} {info['shape']}"


def values_of_parts(folder: Path, rng: random.Random) -> str | None:
    """Other bytes of tensors, without checksums that would tell."""
    files = tensor_files(folder)
    if not files:
        return None
    path = rng.choice(files)
    header, body = parse(path)
    if "ao" in header.get("__metadata__", {}):
        ao = json.loads(header["__metadata__"]["ao"])
        ao["crc32"] = {}
        sealed(header, ao)
    names = [name for name in header if name != "__metadata__"]
    wanted = [
        name for name in names if name.endswith(("indices", "index", "scale", "zero_point"))
    ] or names
    if not wanted:
        return None
    start, end = header[rng.choice(wanted)]["data_offsets"]
    data = bytearray(body)
    for _ in range(rng.choice((1, 8, end - start))):
        if end > start:
            data[rng.randrange(start, end)] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
            )
    write(path, header, bytes(data))
    return f"{path.name}: other values"


def safetensors_header(folder: Path, rng: random.Random) -> str | None:
    """A change of the header that the safetensors package reads."""
    files = tensor_files(folder)
    if not files:
        return None
    path = rng.choice(files)
    header, body = parse(path)
    what = changed(header, rng)
    with contextlib.suppress(UnicodeEncodeError):
        write(path, header, body)
    return f"{path.name}: {what}"


# -- any file --------------------------------------------------------------------------------------


def any_file(folder: Path, rng: random.Random) -> Path | None:
    """One of the files, those of unfinished work too."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return rng.choice(found) if found else None


def noise(folder: Path, rng: random.Random) -> str | None:
    """Flipped bits, a cut, bytes too many."""
    path = any_file(folder, rng)
    if path is None:
        return None
    data = bytearray(path.read_bytes())
    how = rng.choice(("flip", "cut", "append", "zero_point", "start"))
    if how == "cut" or not data:
        data = data[: rng.randrange(len(data) + 1)]
    elif how == "append":
        data += rng.randbytes(rng.choice((1, 8, 1000)))
    else:
        for _ in range(rng.choice((1, 1, 10))):
            at = rng.randrange(min(len(data), 64) if how == "start" else len(data))
            data[at] = 0 if how == "zero_point" else data[at] ^ 1 << rng.randrange(8)
    path.write_bytes(bytes(data))
    return f"{path.name}: {how}"


def special(folder: Path, rng: random.Random) -> str | None:
    """A pipe, a device, a socket, a directory or a link in the place of a file, or next to it."""
    path = any_file(folder, rng)
    if path is None:
        return None
    name = rng.choice((*[path.name] * 3, *NAMES))
    target, outside = path.with_name(name), folder.parent / "sentinel" / "secret"
    if target.is_dir() and not target.is_symlink():
        return None
    kept = target.read_bytes() if target.is_file() else b""
    if target.exists() or target.is_symlink():
        target.unlink()
    how = rng.choice(("pipe", "directory", "socket", "elsewhere", *LINKS))
    if how == "pipe":
        os.mkfifo(target)
    elif how == "directory":
        target.mkdir()
    elif how == "socket":
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX) as server,
        ):  # a path may be too long
            server.bind(str(target))
    elif how == "elsewhere":  # the same content, reached by a link
        (away := folder.parent / "away").write_bytes(kept)
        target.symlink_to(away)
    else:
        target.symlink_to(LINKS[how].format(outside=outside, itself=target))
    return f"{target.name}: {how}"


def missing(folder: Path, rng: random.Random) -> str | None:
    """A file that is gone, or has the name of another."""
    path = any_file(folder, rng)
    if path is None:
        return None
    if rng.random() < 0.5:
        path.unlink()
        return f"{path.name}: gone"
    other = any_file(folder, rng)
    assert other is not None
    if other != path:
        shutil.copyfile(path, other)
    return f"{other.name} is {path.name}"


CHANGES: dict[str, Change] = {
    "ao header": ao_header,
    "dtypes": dtypes_of_parts,
    "values": values_of_parts,
    "header": safetensors_header,
    "index": json_change("model.safetensors.index.json"),
    "manifest": json_change("ao_manifest.json"),
    "state": json_change(".quantizing/state.json"),
    "config": json_change("config.json"),
    "noise": noise,
    "special": special,
    "missing": missing,
}

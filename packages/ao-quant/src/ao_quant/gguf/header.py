"""The header of a GGUF file, which may be anybody's: walked through before the `gguf` package reads it.

That package trusts the numbers in a header: where one says that an array has 2**60 items, it begins to
read them.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ao_core.ext import CheckpointError
from ao_core.ext.saving import not_a_file
from ao_core.ext.schema import SHAPE, SchemaError, check

__all__ = ["check_header"]

#: bytes of the values of each type; of a string and an array, what they begin with
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 8: 8, 9: 12, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
#: arrays within arrays, and dimensions of a tensor, at most
_DEPTH, _DIMENSIONS = 4, 8


def check_header(path: Path) -> None:
    """Raise `CheckpointError` where a header contradicts itself, or says more than the file has.

    Raises:
        CheckpointError: see above; or it is missing, a pipe, a device or the like.
    """
    if reason := not_a_file(path):
        raise CheckpointError(f"{path}: {reason}")
    with path.open("rb") as file:
        start = file.read(24)
        if start[:4] != b"GGUF" or len(start) < 24:
            raise CheckpointError(
                f"{path} is not a GGUF file, or it is damaged: the magic is wrong"
            )
        version, tensors, keys = struct.unpack("<IQQ", start[4:])
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{path}: only little-endian files are supported")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _Walk(data).header(tensors, keys)
            except SchemaError as error:
                raise CheckpointError(
                    f"{path} is not a GGUF file, or it is damaged: {error}"
                ) from error


class _Walk:
    """A place in the header, which goes on over what is there."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 24

    def header(self, tensors: int, keys: int) -> None:
        """Go over all keys and the description of each tensor."""
        for i in range(keys):
            name = self.text(f"the name of key {i}")
            self.value(self.number("<I", f"the type of {name}"), name, _DEPTH)
        for i in range(tensors):
            name = self.text(f"the name of tensor {i}")
            count = self.number("<I", f"dimensions of {name}")
            if not 1 <= count <= _DIMENSIONS:
                raise SchemaError(f"{name} has {count} dimensions, and 1 to {_DIMENSIONS} can be")
            shape = [self.number("<Q", f"shape of {name}") for _ in range(count)]
            check(shape, SHAPE, f"shape of {name}")
            self.skip(12, f"type and place of {name}")

    def value(self, kind: int, name: str, depth: int) -> None:
        """Go over a value of a type."""
        if kind not in _SIZES:
            raise SchemaError(f"{name} is of type {kind}, and there is none")
        if kind == _STRING:
            self.text(name)
        elif kind == _ARRAY:
            inner, count = self.number("<I", name), self.number("<Q", name)
            if depth == 0 or inner not in _SIZES:
                raise SchemaError(f"{name} has arrays too deep, or of type {inner}")
            if inner not in (_STRING, _ARRAY):
                self.skip(_SIZES[inner] * count, name)
                return
            for _ in range(count):
                self.value(inner, name, depth - 1)
        else:
            self.skip(_SIZES[kind], name)

    def text(self, what: str) -> str:
        """A text, which must be UTF-8, shown as it is in errors."""
        size = self.number("<Q", what)
        start = self.at
        self.skip(size, what)
        try:
            return repr(str(self.data[start : self.at], "utf-8"))[:80]
        except UnicodeDecodeError as error:
            raise SchemaError(f"{what} is not a text in UTF-8: {error}") from error

    def number(self, kind: str, what: str) -> int:
        """A number of a format of `struct`."""
        start = self.at
        self.skip(struct.calcsize(kind), what)
        value: int = struct.unpack_from(kind, self.data, start)[0]
        return value

    def skip(self, size: int, what: str) -> None:
        """Go on by so many bytes, which must be there."""
        if size > len(self.data) - self.at:
            raise SchemaError(f"{what} ends behind the end of the file")
        self.at += size

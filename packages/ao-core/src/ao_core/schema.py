"""What data from a file must look like, as records, and a check that names the field that does not.

A file may be anybody's: it is parsed and checked as a whole before anything reads a value of it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from reprlib import Repr
from typing import Any, NoReturn, TypeAlias

__all__ = [
    "ANY",
    "BOOL",
    "COUNT",
    "DEPTH",
    "FILE_NAME",
    "FINITE",
    "SHA256",
    "SHAPE",
    "TEXT",
    "Fields",
    "Items",
    "Number",
    "OneOf",
    "Optional",
    "Row",
    "Schema",
    "SchemaError",
    "Table",
    "Text",
    "check",
    "is_unicode",
    "parse_json",
]

#: lists and objects inside one another, at most
DEPTH = 32
#: elements of a tensor, and entries along one dimension, at most
_ELEMENTS = 1 << 48
_SHOWN = 60
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = _SHOWN


class SchemaError(ValueError):
    """Data is not what its schema says; names the field."""


@dataclass(frozen=True)
class Text:
    """A string that can be written as UTF-8, and that the whole of a pattern matches, if there is one."""

    pattern: str = ""
    #: what such a text is, for errors
    what: str = "text"

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        if not isinstance(data, str) or not is_unicode(data):
            _refuse(data, where, self.what)
        if self.pattern and not re.fullmatch(self.pattern, data):
            _refuse(data, where, self.what)


@dataclass(frozen=True)
class Number:
    """A whole number of some range, which True and False are not."""

    #: the least
    low: int
    #: the greatest
    high: int

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        if type(data) is not int or not self.low <= data <= self.high:
            _refuse(data, where, f"a whole number from {self.low} to {self.high}")


@dataclass(frozen=True)
class Kind:
    """A value of one of some types, exactly."""

    types: tuple[type, ...]
    what: str

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        if self.types and type(data) not in self.types:
            _refuse(data, where, self.what)
        if type(data) is float and not isfinite(data):
            _refuse(data, where, "a finite number")


@dataclass(frozen=True)
class Items:
    """A list, or a tuple, of items of one schema."""

    #: the schema of each
    item: Schema
    #: how many there are at least
    least: int = 0
    #: how many there are at most; None: any number
    most: int | None = None

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        if not isinstance(data, (list, tuple)):
            _refuse(data, where, "a list")
        if len(data) < self.least or (self.most is not None and len(data) > self.most):
            most = "" if self.most is None else f" to {self.most}"
            raise SchemaError(f"{where} has {len(data)} items, and needs {self.least}{most}")
        for i, item in enumerate(data):
            check(item, self.item, f"{where}[{i}]", depth)


@dataclass(frozen=True)
class Row:
    """A list, or a tuple, whose items have one schema each."""

    items: tuple[Schema, ...]

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        check(data, Items(ANY, len(self.items), len(self.items)), where, depth)
        for i, (item, schema) in enumerate(zip(data, self.items, strict=True)):
            check(item, schema, f"{where}[{i}]", depth)


@dataclass(frozen=True)
class Table:
    """An object whose keys are any names, and whose values are of one schema."""

    #: the schema of each value
    value: Schema
    #: the schema of each key
    key: Schema = field(default_factory=Text)
    #: how many there are at least
    least: int = 0

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        if not isinstance(data, Mapping):
            _refuse(data, where, "an object")
        if len(data) < self.least:
            raise SchemaError(f"{where} is empty")
        for key, value in data.items():
            check(key, self.key, f"a name in {where}", depth)
            check(value, self.value, f"{where}[{key!r:.{_SHOWN}}]", depth)


@dataclass(frozen=True)
class Fields:
    """An object with certain fields; unknown ones are ignored, unless it is `closed`."""

    #: the schema of each field that must be there
    required: Mapping[str, Schema]
    #: the schema of each field that may be there
    optional: Mapping[str, Schema] = field(default_factory=dict)
    closed: bool = False

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        if not isinstance(data, Mapping):
            _refuse(data, where, "an object")
        known = {**self.required, **self.optional}
        if lost := [name for name in self.required if name not in data]:
            raise SchemaError(f"{where} lacks the field {lost[0]!r}")
        if self.closed and (extra := sorted(map(repr, data.keys() - known.keys()))):
            raise SchemaError(
                f"{where} has no field {extra[0]:.{_SHOWN}}; known: {', '.join(known)}"
            )
        for name, schema in known.items():
            if name in data:
                check(data[name], schema, f"{where}.{name}", depth)


@dataclass(frozen=True)
class OneOf:
    """What any of some schemas takes; the last one says what is wrong, unless `what` does."""

    schemas: tuple[Schema, ...]
    what: str = ""

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        for schema in self.schemas[:-1] if not self.what else self.schemas:
            try:
                return check(data, schema, where, depth)
            except SchemaError:
                continue
        if self.what:
            _refuse(data, where, self.what)
        return check(data, self.schemas[-1], where, depth)


@dataclass(frozen=True)
class Optional:
    """None, or what a schema takes."""

    schema: Schema

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        if data is not None:
            check(data, self.schema, where, depth)


@dataclass(frozen=True)
class Shape:
    """Sizes of a tensor that torch can hold: 0 to 2**48 elements."""

    def check(self, data: Any, where: str, depth: int) -> None:
        """Raise `SchemaError` where `data` is something else."""
        check(data, Items(COUNT, most=64), where, depth)
        elements = 1
        for size in data:
            elements *= max(size, 1)
        if elements > _ELEMENTS:
            raise SchemaError(f"{where}={list(data)} has more than 2**48 elements")


#: a function gives a schema that contains itself
Schema: TypeAlias = (
    "Single | Items | Row | Table | Fields | OneOf | Optional | Callable[[], Schema]"
)
Single: TypeAlias = "Text | Number | Kind | Shape"

#: any string
TEXT = Text()
#: any value
ANY = Kind((), "anything")
#: True or False
BOOL = Kind((bool,), "true or false")
#: a float that is neither NaN nor infinite
FINITE = Kind((float,), "a finite number")
#: a whole number of elements, from 0
COUNT = Number(0, _ELEMENTS)
#: the shape of a tensor: a list of sizes
SHAPE = Shape()
#: of a file beside the one that names it
SHA256 = Text(r"[0-9a-f]{64}", "a SHA-256 in hexadecimal digits")
FILE_NAME = Text(
    r"(?!\.{1,2}$)[^/\\\x00" + (":" if os.name == "nt" else "") + "]{1,255}",
    "the name of a file in the same folder",
)


def check(data: Any, schema: Schema, where: str, depth: int = DEPTH) -> None:
    """Raise `SchemaError` where `data` is not what the schema says.

    Args:
        data: of dicts, lists, strings, numbers, booleans and None, as JSON gives them.
        schema: what it must be.
        where: the name of the data, with which errors begin: ``tensors['w'].shape[1]``.
        depth: lists and objects inside one another, at most.
    """
    if depth < 0:
        raise SchemaError(f"{where:.{_SHOWN}}… is nested too deeply")
    while callable(schema):
        schema = schema()
    schema.check(data, where, depth - 1)


def parse_json(text: str | bytes) -> Any:
    """The data of a JSON text, which must be strict: in UTF-8, no name twice, finite numbers.

    Raises:
        SchemaError: it is not.
    """
    try:
        return json.loads(
            text if isinstance(text, str) else str(text, "utf-8"),
            object_pairs_hook=_no_name_twice,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except SchemaError:
        raise
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise SchemaError(f"it is not a JSON text: {error}") from error


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise SchemaError(f"the name {name!r:.{_SHOWN}} is there twice")
            seen.add(name)
    return data


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        _no_constant(text)
    return value


def _no_constant(text: str) -> NoReturn:
    raise SchemaError(f"{text:.{_SHOWN}} is not a finite number")


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8, which names of files and texts in JSON need not be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(data: Any, where: str, what: str) -> NoReturn:
    raise SchemaError(f"{where}={_REPR.repr(data)} is not {what}")

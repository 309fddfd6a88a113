"""Schemas: what a file or a configuration must be, checked before anything is read from it."""

from __future__ import annotations

from ao_core.schema import (
    ANY,
    BOOL,
    COUNT,
    DEPTH,
    FILE_NAME,
    FINITE,
    SHAPE,
    TEXT,
    Fields,
    Items,
    Number,
    OneOf,
    Optional,
    Row,
    Schema,
    SchemaError,
    Table,
    Text,
    check,
    parse_json,
)

__all__ = [
    "ANY",
    "BOOL",
    "COUNT",
    "DEPTH",
    "FILE_NAME",
    "FINITE",
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
    "parse_json",
]

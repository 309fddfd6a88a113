"""Data of files: every wrong type and value is an error that names the field."""

from __future__ import annotations

import pytest

from ao_core.errors import ConfigError
from ao_core.schema import (
    COUNT,
    FILE_NAME,
    SHAPE,
    TEXT,
    Fields,
    Items,
    OneOf,
    Optional,
    Row,
    SchemaError,
    Table,
    Text,
    check,
    parse_json,
)
from ao_core.spec import Spec

SCHEMA = Fields(
    {"shape": SHAPE, "name": TEXT},
    {"rows": Items(Row((TEXT, COUNT))), "of": Optional(Table(Text("[a-z]", "a letter")))},
    closed=True,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"shape": []},
        {"shape": (0, 1 << 48)},
        {"rows": [["a", 1], ("b", 2)], "of": None},
        {"of": {"any": "x"}},
    ],
    ids=str,
)
def test_what_is_taken(change):
    check({"shape": [1, 2], "name": "é"} | change, SCHEMA, "data")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": None}, r"data\.shape=None is not a list"),
        ({"shape": [1, "2"]}, r"data\.shape\[1\]='2' is not a whole number"),
        ({"shape": [1.0]}, r"data\.shape\[0\]=1\.0 is not a whole number"),
        ({"shape": [True]}, r"data\.shape\[0\]=True is not a whole number"),
        ({"shape": [-1]}, r"data\.shape\[0\]=-1 is not a whole number"),
        ({"shape": [2**70]}, r"data\.shape\[0\]=.* is not a whole number"),
        ({"shape": [1 << 30, 1 << 30]}, r"data\.shape=.* more than 2\*\*48 elements"),
        ({"shape": [0, 1 << 30, 1 << 30]}, r"data\.shape=.* more than 2\*\*48 elements"),
        ({"shape": [1] * 65}, r"data\.shape has 65 items"),
        ({"name": 3}, r"data\.name=3 is not text"),
        ({"name": "\ud800"}, r"data\.name='\\ud800' is not text"),
        ({"rows": [["a"]]}, r"data\.rows\[0\] has 1 items"),
        ({"rows": [["a", "b"]]}, r"data\.rows\[0\]\[1\]='b' is not a whole number"),
        ({"of": {"k": "xy"}}, r"data\.of\['k'\]='xy' is not a letter"),
        ({"of": []}, r"data\.of=\[\] is not an object"),
        ({"more": 1}, r"data has no field 'more'; known: shape, name, rows, of"),
    ],
    ids=str,
)
def test_what_is_not(change, message):
    with pytest.raises(SchemaError, match=message):
        check({"shape": [1, 2], "name": "a"} | change, SCHEMA, "data")


def test_a_field_that_is_missing():
    with pytest.raises(SchemaError, match=r"data lacks the field 'name'"):
        check({"shape": []}, SCHEMA, "data")


def test_any_of_some():
    schema = OneOf((TEXT, COUNT), "text or a number")
    check("a", schema, "data")
    check(3, schema, "data")
    with pytest.raises(SchemaError, match=r"data=None is not text or a number"):
        check(None, schema, "data")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../a", "a/b", "a\\b", "a\x00", "x" * 256, 3, None]
)
def test_names_outside_the_folder(name):
    with pytest.raises(SchemaError, match="is not the name of a file in the same folder"):
        check(name, FILE_NAME, "file")


@pytest.mark.parametrize("name", ["a", "...", ".hidden", "model-1.safetensors", "ä b"])
def test_names_inside(name):
    check(name, FILE_NAME, "file")


def test_nesting_ends():
    nested: object = []
    for _ in range(50):
        nested = [nested]

    def schema():
        return Items(schema)

    with pytest.raises(SchemaError, match="nested too deeply"):
        check(nested, schema, "data")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a JSON text"),
        ("{", "not a JSON text"),
        (b"\xff", "not a JSON text: .*utf-8"),
        (b"\xef\xbb\xbf{}", "not a JSON text"),
        ('{"a": 1, "a": 2}', "the name 'a' is there twice"),
        ("[NaN]", "NaN is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        ("[1e999]", "1e999 is not a finite number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 5000, "not a JSON text"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_is_strict(text, message):
    with pytest.raises(SchemaError, match=message):
        parse_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": 3}, {"dtype": []}, {"dtype": None},
        {"block": "1"}, {"block": [1.5]}, {"block": []}, {"block": [0]}, {"block": [-2]}, {"block": [2**70]},
        {"block": [[1]]}, {"block": None},
        {"scale_dtype": 3}, {"scale_dtype": "float7"}, {"scale_dtype": ["float32"]}, {"scale_dtype": {}},
        {"zero_point": 1}, {"zero_point": "some"}, {"layout": {}}, {"layout": None},
        {"act": "int8"}, {"act": {"dtype": "int8"}},
        {"options": {"a": 1}}, {"options": [["a"]]}, {"options": [["a", []]]}, {"options": [["a", None]]},
        {"options": [[1, 1]]}, {"options": [["a", 2**70]]}, {"options": "ab"},
        {"static": 1}, {"static": True}, {"shiny": 1},
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_a_spec(change):
    good = Spec(
        "int8", (1, -1), act=Spec("int8", (1, -1)), options=(("a", 1), ("b", 0.5))
    ).to_dict()
    assert Spec.from_dict(good).to_dict() == good
    with pytest.raises(ConfigError, match=next(iter(change))):
        Spec.from_dict(good | change)

"""A configuration from arguments: names, files, --set."""

from __future__ import annotations

import os
from typing import Literal, Optional, Union

import pytest

from ao_core import FqnToConfig, config_to_json, config_to_yaml
from ao_core.cli.settings import load_config, parse_value
from ao_core.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("64", int, 64),
        ("-1", int, -1),
        ("0.5", float, 0.5),
        ("1e-3", float, 1e-3),
        ("64", float, 64.0),
        ("64", str, "64"),
        ("true", bool, True),
        ("No", bool, False),
        ("1", bool, True),
        ("64", int | str, 64),
        ("row", int | str, "row"),
        ("64", Union[str, int], 64),  # noqa: UP007
        ("none", Optional[str], None),  # noqa: UP045
        ("null", int | None, None),
        ("none", str, "none"),
        ("1", bool | int, True),
        ("e5m2", Literal["e4m3", "e5m2"], "e5m2"),
        ("2", Literal[1, 2], 2),
        ("1,2, 3", tuple[int, ...], (1, 2, 3)),
        ("(1, 128)", tuple[int, ...], (1, 128)),
        ("", tuple[int, ...], ()),
    ],
)  # fmt: skip
def test_values(text, annotation, value):
    parsed = parse_value(text, annotation)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "annotation"),
    [
        ("x", int),
        ("1.5", int),
        ("maybe", bool),
        ("e3", Literal["e4"]),
        ("x", int | float),
        ("1,x", tuple[int, ...]),
    ],
)
def test_values_of_another_type(text, annotation):
    with pytest.raises(ValueError, match="is no"):
        parse_value(text, annotation)


def test_name_and_settings(small_config):
    config = load_config("small4", ["group_size=row", "symmetric=no", "widths=1,2", "note=a=b"])
    assert config == small_config("row", False, (1, 2), "a=b")
    assert load_config("small4/row", ["group_size=16"]) == small_config(16)


def test_a_setting_may_name_another_configuration(small_config):
    assert parse_value("small4/row", small_config) == small_config("row")


@pytest.mark.parametrize(
    ("suffix", "write"), [(".json", config_to_json), (".yaml", config_to_yaml)]
)
def test_files(tmp_path, suffix, write, small_config):
    path = tmp_path / f"config{suffix}"
    path.write_text(write(small_config(16)))
    assert load_config(str(path), ["symmetric=false"]) == small_config(16, symmetric=False)
    rules = FqnToConfig({"lm_head": None, "*": "small4"})
    path.write_text(write(rules))
    assert load_config(str(path), []) == rules
    with pytest.raises(ConfigError, match="a configuration for each name"):
        load_config(str(path), ["group_size=16"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("group_size", "write NAME=VALUE"),
        ("groupsize=32", "Did you mean 'group_size'"),
        ("widths=a", "'a' is not of type int"),
        ("group_size=64", "use 16, 32 or 'row'"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config("small4", [setting])


def test_unknown_name_and_file(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'small4'"):
        load_config("smal4", [])
    with pytest.raises(ConfigError, match=r"absent\.json is missing"):
        load_config(str(tmp_path / "absent.json"), [])
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match=r"pipe\.json is a pipe, and no file"):
        load_config(str(tmp_path / "pipe.json"), [])
    (tmp_path / "other.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"other\.json cannot be read"):
        load_config(str(tmp_path / "other.json"), [])

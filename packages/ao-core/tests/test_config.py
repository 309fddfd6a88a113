"""Configurations by name, JSON and YAML, and their errors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import ao_core
from ao_core import Config, FqnToConfig
from ao_core.errors import ConfigError, UnknownNameError
from ao_core.recipes import WeightOnlyConfig


def test_names_resolve() -> None:
    assert ao_core.resolve_config("weight_only") == WeightOnlyConfig()
    config = WeightOnlyConfig("int4", 32)
    assert ao_core.resolve_config(config) is config


def test_unknown_name_suggests() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'weight_only'"):
        ao_core.resolve_config("weight_onyl")


@pytest.mark.parametrize("wrong", [WeightOnlyConfig, 4, None])
def test_wrong_type_is_named(wrong: object) -> None:
    with pytest.raises(ConfigError, match="pass a Config or a recipe name"):
        ao_core.resolve_config(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        WeightOnlyConfig(),
        WeightOnlyConfig("int4", 32, layout="packed"),
        FqnToConfig({"lm_head": None, "re:.*mlp.*": WeightOnlyConfig("int4"), "*": "weight_only"}),
    ],
)
def test_round_trips(config: Config) -> None:
    assert ao_core.config_from_dict(ao_core.config_to_dict(config)) == config
    assert ao_core.config_from_json(ao_core.config_to_json(config)) == config
    assert ao_core.config_from_yaml(ao_core.config_to_yaml(config)) == config
    assert hash(ao_core.config_from_json(ao_core.config_to_json(config))) == hash(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "1"), ("version", [2]), ("version", True), ("args", 3), ("args", ["x"]), ("provider", 3),
     ("entries", 3), ("entries", ["x"]), ("entries", {"*": 3}), ("entries", {"*": [1]})],
)  # fmt: skip
def test_fields_of_stored_configurations(field: str, value: object) -> None:
    stored = ao_core.config_to_dict(
        FqnToConfig({"*": None}) if field == "entries" else WeightOnlyConfig()
    )
    with pytest.raises(ConfigError, match=field):
        ao_core.config_from_dict({**stored, field: value})


def test_errors_of_stored_configurations() -> None:
    good = ao_core.config_to_dict(WeightOnlyConfig())
    with pytest.raises(ConfigError, match="version=99 is newer than 1"):
        ao_core.config_from_dict({**good, "version": 99})
    with pytest.raises(
        ConfigError, match=r"no argument \['bits'\]; known: \['dtype', 'group_size', "
    ):
        ao_core.config_from_dict({**good, "args": {"bits": 3}})
    with pytest.raises(UnknownNameError, match="written by 'ao-marlin': install it"):
        ao_core.config_from_dict({"name": "marlin", "provider": "ao-marlin"})
    with pytest.raises(ConfigError, match="needs a 'name'"):
        ao_core.config_from_dict({"args": {}})
    for text in ("{", "[1]"):
        with pytest.raises(ConfigError, match="JSON"):
            ao_core.config_from_json(text)
    for text in ("a: [", "- 1"):
        with pytest.raises(ConfigError, match="YAML"):
            ao_core.config_from_yaml(text)
    with pytest.raises(UnknownNameError, match="unknown dtype 'float9'"):
        WeightOnlyConfig("float9").check()


def test_fqn_to_config_is_checked() -> None:
    with pytest.raises(ConfigError, match="at least one name"):
        FqnToConfig({})
    with pytest.raises(ConfigError, match="itself a FqnToConfig"):
        FqnToConfig({"a": FqnToConfig({"*": None})})


def test_a_config_without_transform_is_named() -> None:
    @dataclass(frozen=True)
    class Orphan(Config):
        pass

    with pytest.raises(UnknownNameError, match="Orphan"):
        ao_core.config_to_dict(Orphan())

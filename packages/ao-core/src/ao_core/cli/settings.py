"""A configuration from command-line arguments: a name or a file, and `--set NAME=VALUE`."""

from __future__ import annotations

import types
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ao_core.calibration.needing import resolved
from ao_core.config import (
    Config,
    FqnToConfig,
    config_from_json,
    config_from_yaml,
    resolve_config,
)
from ao_core.discovery import did_you_mean
from ao_core.errors import ConfigError
from ao_core.regular_files import read_text

__all__ = ["load_config", "load_configs", "parse_value"]

_READERS = {".json": config_from_json, ".yaml": config_from_yaml, ".yml": config_from_yaml}
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load_config(name: str, settings: list[str]) -> Config:
    """The configuration of that name, or in that .json or .yaml file, with some fields set.

    Raises:
        UnknownNameError: no recipe has that name.
        ConfigError: a field or value is not one of the configuration's, or the file cannot be read.
    """
    read = _READERS.get(Path(name).suffix)
    if read is None:
        config = resolve_config(name)
    else:
        try:
            config = read(read_text(name))
        except ConfigError as error:
            raise ConfigError(f"--config {error}") from error
    if settings and isinstance(config, FqnToConfig):
        raise ConfigError(f"--set has no effect on {name}, which has a configuration for each name")
    return replace(config, **dict(_setting(text, type(config)) for text in settings))


def load_configs(name: str, settings: list[str]) -> list[Config]:
    """The same, or the configurations of a stack's name, such as "rotate+gptq/int4".

    Raises:
        UnknownNameError: as of `load_config`.
        ConfigError: likewise.
    """
    if Path(name).suffix not in _READERS and len(found := resolved(name)) > 1:
        if settings:
            raise ConfigError(
                f"--set has no effect on {name}, which is {len(found)} configurations"
            )
        return found
    return [load_config(name, settings)]


def _setting(text: str, config_type: type[Config]) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write NAME=VALUE, for example group_size=64")
    known = [field.name for field in fields(config_type)]
    if name not in known:
        hint = did_you_mean(name, known)
        has = f"its fields are {', '.join(known)}" if known else "it has no fields"
        raise ConfigError(f"--set {text}: {config_type.__name__} has no {name!r}.{hint} Here {has}")
    annotation = get_type_hints(config_type)[name]
    try:
        return name, parse_value(value, annotation)
    except ValueError as error:
        raise ConfigError(f"--set {text}: {error}") from error


def parse_value(text: str, annotation: Any) -> Any:
    """A value of an annotated type from text; of a union, the first member that fits.

    Tried in the order None, bool, int, float, tuple, the rest, so that "64" for `int | str` is 64.

    Raises:
        ValueError: the text is none; says what is expected.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _first(text, sorted(arguments, key=_eagerness), annotation)
    if origin is Literal:
        for choice in arguments:
            if text == str(choice):
                return choice
    elif origin is tuple:
        words = [word.strip() for word in text.strip("()[]").split(",") if word.strip()]
        return tuple(parse_value(word, arguments[0]) for word in words)
    elif annotation is type(None):
        if text.lower() in ("none", "null"):
            return None
    elif annotation is bool:
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
    elif annotation in (int, float, str):
        try:
            return annotation(text)
        except ValueError:
            pass
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        return resolve_config(text)
    expected = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    raise ValueError(f"{text!r} is not of type {expected}")


def _first(text: str, choices: list[Any], annotation: Any) -> Any:
    for choice in choices:
        try:
            return parse_value(text, choice)
        except (ValueError, LookupError):
            continue
    raise ValueError(f"{text!r} is not of type {annotation}")


def _eagerness(annotation: Any) -> int:
    order = [type(None), bool, int, float, tuple, str]
    kind = get_origin(annotation) or annotation
    return order.index(kind) if kind in order else len(order) - 2

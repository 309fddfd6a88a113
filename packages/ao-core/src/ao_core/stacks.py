"""Stacks of configurations that are applied one after the other: names, and orders that make no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ao_core.config import Config, config_named
from ao_core.errors import ConfigError
from ao_core.registry import registry
from ao_core.weights import WeightConfig

__all__ = ["check_order", "methods", "rounds", "stack_of"]

#: the field of a configuration that finds codes or scales of another one's format
_BASE = "base"


def stack_of(name: str) -> list[Config] | None:
    """The configurations that "METHOD+METHOD/FORMAT" names; None where it is no such name.

    Methods are names of algorithms or of other configurations that are no format themselves, in the order in
    which they are applied. The format is the name of a recipe, or its short one. A method with a field `base`
    gets the format; where none has one, the format comes last.

    Example: ``stack_of("gptq/int4-g128") == [GPTQConfig(Int4WeightOnlyConfig(128))]``

    Raises:
        UnknownNameError: no recipe has the name of the format.
    """
    methods, slash, format_name = name.partition("/")
    types = [_method(method) for method in methods.split("+")]
    if not slash or None in types:
        return None
    base = config_named(format_name)
    takes_base = [_takes_base(config_type) for config_type in types]
    stack: list[Config] = [
        config_type(**{_BASE: base}) if takes else config_type()  # type: ignore[misc]
        for config_type, takes in zip(types, takes_base, strict=True)
    ]
    return stack if any(takes_base) else [*stack, base]


def methods() -> list[str]:
    """The names that a stack's name can begin with."""
    tables = (registry.algorithms, registry.transforms)
    return sorted({name for table in tables for name in table.names() if _method(name)})


def _method(name: str) -> type[Config] | None:
    """The class of configuration of a method; None for formats, and where there is none of the name."""
    for table in (registry.algorithms, registry.transforms):
        if name in table:
            found: type[Config] = table.get(name).config_type
            is_format = issubclass(found, WeightConfig)
            return None if is_format or registry.algorithm_for(found) is None else found
    return None


def _takes_base(config_type: Any) -> bool:
    return any(field.name == _BASE for field in fields(config_type))


def rounds(config: Config) -> bool:
    """Whether a configuration makes codes of weights, after which nothing else can be done with them."""
    return isinstance(config, WeightConfig) or isinstance(
        getattr(config, _BASE, None), WeightConfig
    )


def check_order(configs: Sequence[Config]) -> None:
    """Raise where one of the configurations comes too late.

    Raises:
        ConfigError: an algorithm comes after a configuration that has rounded the weights.
    """
    before: Config | None = None
    for config in configs:
        name = type(config).__name__
        is_algorithm = registry.algorithm_for(type(config)) is not None
        if before is not None and is_algorithm and rounds(config):
            raise ConfigError(
                f"config=[…, {type(before).__name__}, …, {name}]: both round the same weights, and the "
                "second would find them quantized; use one of them, or FqnToConfig to say which weights "
                "each gets"
            )
        if before is not None and is_algorithm:
            raise ConfigError(
                f"config=[…, {type(before).__name__}, …, {name}]: {name} changes weights, which are "
                f"quantized by then; put it before {type(before).__name__}"
            )
        if rounds(config):
            before = config

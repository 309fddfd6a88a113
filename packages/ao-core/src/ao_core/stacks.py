"""Stacks of configurations that are applied one after the other: names, and orders that make no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ao_core.config import Config, config_named
from ao_core.errors import ConfigError
from ao_core.registry import registry

__all__ = ["check_order", "methods", "rounds", "stack_of"]

#: the field of a configuration that finds codes or scales of another one's format
_BASE = "base"


def stack_of(name: str) -> list[Config] | None:
    """The configurations that "METHOD+METHOD/FORMAT" names; None where it is no such name.

    Methods are names of algorithms or of other configurations that are no format themselves, in the order in
    which they are applied. The format is the name of a recipe, or its short one. The last method with a field
    `base` gets the format; where none has one, the format comes last.

    Example: ``stack_of("rotate+gptq/int4-g128") == [RotateConfig(), GPTQConfig(Int4WeightOnlyConfig(128))]``

    Raises:
        UnknownNameError: no recipe has the name of the format.
    """
    methods, slash, format_name = name.partition("/")
    types = [_method(method) for method in methods.split("+")]
    if not slash or None in types:
        return None
    base = config_named(format_name)
    taking = [place for place, config_type in enumerate(types) if _takes_base(config_type)][-1:]
    stack: list[Config] = [
        config_type(**{_BASE: base}) if place in taking else config_type()  # type: ignore[misc]
        for place, config_type in enumerate(types)
    ]
    return stack if taking else [*stack, base]


def methods() -> list[str]:
    """The names that a stack's name can begin with."""
    tables = (registry.algorithms, registry.model_transforms, registry.transforms)
    return sorted({name for table in tables for name in table.names() if _method(name)})


def _method(name: str) -> type[Config] | None:
    """The class of configuration of a method; None for formats, and where there is none of the name."""
    for table in (registry.algorithms, registry.model_transforms, registry.transforms):
        if name in table:
            found: type[Config] = table.get(name).config_type
            is_format = found.is_format
            if is_format or not (
                registry.algorithm_for(found) or registry.model_transform_for(found)
            ):
                return None
            return found
    return None


def _takes_base(config_type: Any) -> bool:
    return any(field.name == _BASE for field in fields(config_type))


def rounds(config: Config) -> bool:
    """Whether a configuration makes codes of weights, after which nothing else can be done with them."""
    base = getattr(config, _BASE, None)
    return config.is_format or (isinstance(base, Config) and rounds(base))


def check_order(configs: Sequence[Config]) -> None:
    """Raise where one of the configurations comes too late.

    Raises:
        ConfigError: an algorithm comes after a configuration that has rounded the weights.
    """
    before: Config | None = None
    for config in configs:
        name = type(config).__name__
        is_algorithm = bool(
            registry.algorithm_for(type(config)) or registry.model_transform_for(type(config))
        )
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

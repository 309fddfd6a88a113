"""Configurations: frozen dataclasses with a version, resolved by name through the registry."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from typing import Any, ClassVar, TypeAlias

from ao_core.arguments import check_fields, checked, shown
from ao_core.errors import AoError, ConfigError, MissingExtraError, UnknownNameError
from ao_core.model_records import ModelTransform
from ao_core.records import Algorithm, Transform
from ao_core.registry import Table as Records
from ao_core.registry import registry
from ao_core.schema import (
    ANY,
    TEXT,
    Fields,
    Number,
    OneOf,
    Optional,
    SchemaError,
    Table,
    check,
    parse_json,
)
from ao_core.spec import Spec

__all__ = [
    "Config",
    "ConfigLike",
    "FqnToConfig",
    "config_from_dict",
    "config_from_json",
    "config_from_yaml",
    "config_named",
    "config_to_dict",
    "config_to_json",
    "config_to_yaml",
    "json_object",
    "resolve_config",
]

#: the name under which `FqnToConfig` is written
_FQN_TO_CONFIG = "fqn_to_config"
#: what the form of a configuration must be, besides its name
_FIELDS = Fields(
    {},
    {
        "version": Number(1, 1 << 31),
        "provider": TEXT,
        "args": Table(ANY),
        "entries": Table(Optional(OneOf((TEXT, Table(ANY)), "a name or a configuration"))),
    },
)
#: the key under which a `Spec` among the arguments of a configuration is written
_SPEC = "spec"


@dataclass(frozen=True)
class Config:
    """Base of all configurations. Fields are primitives, tuples of them, or other configurations."""

    version: ClassVar[int] = 1
    #: whether it stores weights in another format, after which nothing else can be done with them
    is_format: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the types of fields be checked too where a subclass has a `__post_init__` of its own.

        That one comes first, since it knows more of what would work and may convert what it is given.
        """
        super().__init_subclass__(**kwargs)
        if (own := cls.__dict__.get("__post_init__")) is not None:

            @wraps(own)
            def post_init(self: Config, *args: Any) -> None:
                try:
                    own(self, *args)
                except AoError:
                    raise
                except Exception:
                    check_fields(self)  # says which field has another type than it was written for
                    raise
                check_fields(self)

            cls.__post_init__ = post_init  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self) -> None:
        """Raise if it cannot be applied: it uses a name that is not registered, or needs data.

        Called before a model is changed, not when it is made: plugins register names after their recipes.
        """

    def of_matrix(self, number: int) -> Config:
        """The same for a matrix of a 3-D weight; another where it has values for each, such as scales."""
        return self


@dataclass(frozen=True)
class FqnToConfig(Config):
    """One configuration per name of a parameter or module: exact names, then "re:…", then "*".

    Values are configurations, recipe names, or None to keep a parameter as it is.

    Example: ``FqnToConfig({"lm_head": None, "re:.*mlp.*": int4_weight_only(), "*": "int8_weight_only"})``
    """

    #: (name or pattern, configuration, or None to keep), in the order that they were given
    entries: tuple[tuple[str, Config | None], ...]

    def __init__(self, entries: Mapping[str, Config | str | None] | Any) -> None:
        try:
            pairs = list(entries.items() if isinstance(entries, Mapping) else entries)
            given = [(key, value) for key, value in pairs]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"entries={shown(entries)}: FqnToConfig needs a mapping of names to configurations, such as "
                "{'lm_head': None, '*': 'int8_weight_only'}"
            ) from error
        resolved = tuple((_name(key), _entry(key, value)) for key, value in given)
        if not resolved:
            raise ConfigError("entries={}: FqnToConfig needs at least one name, e.g. '*'")
        nested = [key for key, value in resolved if isinstance(value, FqnToConfig)]
        if nested:
            raise ConfigError(
                f"entries[{nested[0]!r}] is itself a FqnToConfig; nest the names instead"
            )
        object.__setattr__(self, "entries", resolved)

    @cached_property
    def _exact(self) -> dict[str, Config | None]:
        """The entries by name, made once: models of many experts have as many entries as parameters."""
        return dict(self.entries)

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        """The regular expressions with their keys, in order, compiled once."""
        return [(key, _compiled(key)) for key, _ in self.entries if key.startswith("re:")]

    def match(self, fqn: str) -> tuple[str, Config | None] | None:
        """The entry for a parameter: its name or its module's, then regular expressions, then "*".

        Args:
            fqn: its fully qualified name.

        Returns:
            The key and the configuration, or None where no key matches.

        Raises:
            ConfigError: a regular expression is not valid.
        """
        names = (fqn, fqn.rpartition(".")[0])
        for name in names:
            if name in self._exact:
                return name, self._exact[name]
        for key, pattern in self._patterns:
            if any(pattern.fullmatch(name) for name in names):
                return key, self._exact[key]
        return ("*", self._exact["*"]) if "*" in self._exact else None

    def check(self) -> None:
        """Check all entries."""
        for _, config in self.entries:
            if config is not None:
                config.check()


def _compiled(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key[len("re:") :])
    except re.error as error:
        raise ConfigError(f"{key!r} is not a valid regular expression: {error}") from error


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise ConfigError(
        f"entries: the key {shown(key)} is not a name of a parameter or module, 're:…' or '*'"
    )


def _entry(name: str, value: Any) -> Config | None:
    try:
        return None if value is None else resolve_config(value)
    except ConfigError as error:
        raise ConfigError(f"entries[{name!r}]: {error}") from error


#: what stands for a configuration: itself, the name of a recipe, or its `config_to_dict`
ConfigLike: TypeAlias = Config | str | Mapping[str, Any]


def resolve_config(config: ConfigLike) -> Config:
    """A configuration from itself, a name such as "int4_weight_only", or `config_to_dict`'s form.

    Names are those of recipes, also short ones, and "METHOD/FORMAT": "gptq/int4-g128" is
    ``GPTQConfig("int4-g128")``.

    Raises:
        UnknownNameError: no recipe or transform has that name; with a suggestion.
        ConfigError: it is something else.
    """
    if isinstance(config, Config):
        return config
    if isinstance(config, str):
        return config_named(config)
    if isinstance(config, Mapping):
        return config_from_dict(config)
    hint = " (a class: call it to make a configuration)" if isinstance(config, type) else ""
    raise ConfigError(
        f"config={config!r}{hint} is a {type(config).__name__}; pass a Config or a recipe name"
    )


def config_named(name: str) -> Config:
    """The configuration of a recipe's name or short name, of a transform's or algorithm's, or of a stack's.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: it is the name of a stack of several configurations.
    """
    from ao_core.stacks import methods, stack_of  # which imports this

    if name in registry.recipes:
        return registry.recipes.get(name).config
    for table in _tables():
        if name in table:
            return table.get(name).config_type()
    shorts = {recipe.short: recipe.config for recipe in registry.recipes.values() if recipe.short}
    if name in shorts:
        return shorts[name]
    if (stack := stack_of(name)) is not None:
        if len(stack) == 1:
            return stack[0]
        raise ConfigError(
            f"config={name!r} is a list of {len(stack)} configurations, which quantize_ takes; here one "
            "is needed"
        )
    known = {*registry.recipes.names(), *(known for table in _tables() for known in table.names())}
    _, slash, format_name = name.partition("/")
    known |= {f"{method}/{format_name}" for method in methods() if slash}
    raise UnknownNameError("recipe", name, {*known, *shorts}, registry.notes(name))


def _tables() -> tuple[Records[Transform] | Records[Algorithm] | Records[ModelTransform], ...]:
    """The tables of what a configuration is for; a name that two have is that of one class."""
    return registry.transforms, registry.algorithms, registry.model_transforms


def _record_of(
    config_type: type[Config],
) -> tuple[Transform | Algorithm | ModelTransform, Records[Any]]:
    """What a class of configuration is for, and the table of that."""
    try:
        return registry.transform_for(config_type), registry.transforms
    except UnknownNameError:
        if algorithm := registry.algorithm_for(config_type):
            return algorithm, registry.algorithms
        if model_transform := registry.model_transform_for(config_type):
            return model_transform, registry.model_transforms
        raise


@checked
def config_to_dict(config: Config) -> dict[str, Any]:
    """JSON-ready form: name, version, the distribution that provides it, and all arguments."""
    if isinstance(config, FqnToConfig):
        entries = {key: None if c is None else config_to_dict(c) for key, c in config.entries}
        return {"name": _FQN_TO_CONFIG, "version": config.version, "entries": entries}
    record, table = _record_of(type(config))
    return {
        "name": record.name,
        "version": config.version,
        "provider": table.provider(record.name),
        "args": {f.name: _encode(getattr(config, f.name)) for f in fields(config)},
    }


@checked
def config_from_dict(data: Mapping[str, Any]) -> Config:
    """Inverse of `config_to_dict`.

    Raises:
        ConfigError: `data` is no configuration, has an unknown argument, or was written by a newer version.
        UnknownNameError: nobody registered a configuration of this name; names the package that wrote it.
    """
    name = data.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"data={shown(data)}: a configuration needs a 'name', which is a string")
    try:
        check(data, _FIELDS, name)
    except SchemaError as error:
        raise ConfigError(f"not a configuration: {error}") from error
    if name == _FQN_TO_CONFIG:
        return FqnToConfig(data.get("entries", {}))
    table = next((each for each in _tables() if name in each), None)
    if table is None:
        provider = data.get("provider")
        notes = [f"It was written by {provider!r}: install it."] if provider else []
        known = [known for each in _tables() for known in each.names()]
        raise UnknownNameError("configuration", name, known, [*notes, *registry.notes(name)])
    config_type = table.get(name).config_type
    if (version := data.get("version", 1)) > config_type.version:
        raise ConfigError(
            f"{name}: version={version} is newer than {config_type.version}, which the installed "
            f"{table.provider(name)} reads; upgrade it"
        )
    args = dict(data.get("args", {}))
    known_args = {f.name for f in fields(config_type)}
    if unknown := sorted(set(args) - known_args):
        raise ConfigError(f"{name} has no argument {unknown}; known: {sorted(known_args)}")
    return config_type(**{key: _decode(value) for key, value in args.items()})


def _encode(value: Any) -> Any:
    if isinstance(value, Config):
        return config_to_dict(value)
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Spec):
        return {_SPEC: value.to_dict()}
    raise ConfigError(f"{value!r} in a configuration is not a primitive, tuple or configuration")


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping) and "name" in value:
        return config_from_dict(value)
    if isinstance(value, Mapping) and set(value) == {_SPEC}:
        return Spec.from_dict(value[_SPEC])
    return tuple(_decode(v) for v in value) if isinstance(value, list) else value


@checked
def config_to_json(config: Config) -> str:
    """JSON text of a configuration."""
    return json.dumps(config_to_dict(config), indent=2)


@checked
def config_from_json(text: str) -> Config:
    """A configuration from its JSON text."""
    return config_from_dict(json_object(text, "configuration"))


def json_object(text: str, what: str) -> dict[str, Any]:
    """The object that a JSON text holds; raises `ConfigError`, naming `what` it should be, for others."""
    try:
        data = parse_json(text)
    except SchemaError as error:
        raise ConfigError(f"text={shown(text)}: not a {what} in JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"text={shown(text)}: not a {what} in JSON: an object is expected, not {data!r:.40}"
        )
    return data


@checked
def config_to_yaml(config: Config) -> str:
    """YAML text of a configuration (extra "yaml")."""
    return str(_yaml().safe_dump(config_to_dict(config), sort_keys=False))


@checked
def config_from_yaml(text: str) -> Config:
    """A configuration from its YAML text (extra "yaml").

    Raises:
        ConfigError: `text` is not YAML, or what it holds is no configuration.
        UnknownNameError: nobody registered a configuration of this name.
        MissingExtraError: PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"text={shown(text)}: not a configuration in YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"text={shown(text)}: not a configuration in YAML: expected a mapping, found {data!r}"
        )
    return config_from_dict(data)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("PyYAML", "ao-core[yaml]", "reading and writing YAML") from error
    return yaml

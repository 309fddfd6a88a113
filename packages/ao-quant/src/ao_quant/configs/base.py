"""What the configurations share: group sizes, and checks that name what would work."""

from __future__ import annotations

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.weights import GroupSize

__all__ = ["GROUP_SIZES", "YES_NO", "one_of"]

#: the values of every `group_size`
GROUP_SIZES: tuple[GroupSize, ...] = (32, 64, 128, 256, "row")

YES_NO = (True, False)


def one_of(config: Config, parameter: str, allowed: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless a field has one of the allowed values, of the same type."""
    value = getattr(config, parameter)
    # 64.0 and True equal integers, but would read back as something else from a file
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{parameter}={value!r} in {type(config).__name__}: use one of {choices}")

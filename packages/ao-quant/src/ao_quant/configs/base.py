"""What the configurations share: group sizes, and checks that name what would work."""

from __future__ import annotations

from dataclasses import dataclass, field

from ao_core.config import Config
from ao_core.errors import ConfigError
from ao_core.registry import registry
from ao_core.weights import GroupSize

__all__ = ["GROUP_SIZES", "YES_NO", "ScaledConfig", "one_of"]

#: the values of every `group_size`
GROUP_SIZES: tuple[GroupSize, ...] = (32, 64, 128, 256, "row")

YES_NO = (True, False)


@dataclass(frozen=True)
class ScaledConfig(Config):
    """What configurations of integers share: how scales and zero points are chosen."""

    #: name of a `ScaleMethod`: "absmax", "mse", "hqq" or a plugin's
    scales: str = field(default="absmax", kw_only=True)

    def check(self) -> None:
        """Raise `UnknownNameError` for a way to choose scales that nobody registered."""
        registry.scales.get(self.scales)


def one_of(config: Config, parameter: str, allowed: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless a field has one of the allowed values, of the same type."""
    value = getattr(config, parameter)
    # 64.0 and True equal integers, but would read back as something else from a file
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{parameter}={value!r} in {type(config).__name__}: use one of {choices}")

"""Shared by the configurations: group sizes, and checks whose errors name what would work."""

from __future__ import annotations

from dataclasses import dataclass, field

from ao_core import Config
from ao_core.ext import ConfigError, GroupSize, WeightConfig, registry

__all__ = ["GROUP_SIZES", "LAYERS", "YES_NO", "ScaledConfig", "ZeroPointConfig", "one_of"]

#: the values of every `group_size`
GROUP_SIZES: tuple[GroupSize, ...] = (32, 64, 128, 256, "row")

#: the values of every `layers`: whose activations are quantized
LAYERS = ("linear", "all")

YES_NO = (True, False)


@dataclass(frozen=True)
class ScaledConfig(WeightConfig):
    """Base of integer configurations: how scales and zero points are chosen."""

    #: name of a `ScaleMethod`: "absmax", "mse", "hqq" or a plugin's
    scale_method: str = field(default="absmax", kw_only=True)

    def check(self) -> None:
        """Raise `UnknownNameError` for a scale method that is not registered."""
        registry.scale_methods.get(self.scale_method)


@dataclass(frozen=True)
class ZeroPointConfig(ScaledConfig):
    """Base of integer configurations with zero points."""

    #: "int": the code of 0, in uint8, so that zeros stay exact; "float": any number, in bfloat16, which is a
    #: byte more per group and fits ranges better
    zero_point: str = field(default="int", kw_only=True)

    def __post_init__(self) -> None:
        one_of(self, "zero_point", ("int", "float"))
        if self.zero_point != "int" and getattr(self, "symmetric", False):
            raise ConfigError(
                f"zero_point={self.zero_point!r} with symmetric=True in {type(self).__name__}: symmetric "
                "formats have no zero points; use symmetric=False"
            )


def one_of(config: Config, parameter: str, allowed: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless a field has one of the allowed values, of the same type."""
    value = getattr(config, parameter)
    # 64.0 and True equal integers, but would read back as something else from a file
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{parameter}={value!r} in {type(config).__name__}: use one of {choices}")

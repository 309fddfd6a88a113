"""How keys and values are stored: the configuration, and named ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ao_core import WHOLE, Config, Spec
from ao_core.ext import ConfigError, UnknownNameError, hadamard_step, registry
from ao_core.ext.numerics import largest_block

__all__ = ["BLOCK", "KV_RECIPES", "KVCacheConfig", "kv_config"]

#: tokens that are quantized together, once
BLOCK = 128
#: what `KVCacheConfig.rotate` may be
_ROTATIONS = ("none", "key", "value", "both")

_INT8 = Spec("int8", (1, WHOLE), "float16")
_FLOAT8 = Spec("f8e4m3", (1, WHOLE), "float16")
_UINT4_GROUP = Spec("uint4", (1, 64), "float16", "float", "packed")
_UINT4_TOKEN = Spec("uint4", (1, WHOLE), "float16", "float", "packed")
_UINT4_CHANNEL = Spec("uint4", (BLOCK, 1), "float16", "float", "packed")


@dataclass(frozen=True)
class KVCacheConfig(Config):
    """The formats of keys and values, over (tokens, elements of a head), and what is done to them before.

    A block (1, -1) is one scale for each token and head, (1, 64) one for 64 elements of it, and (128, 1) one
    for each channel of 128 tokens. Any registered number format works.
    """

    #: format of the keys, after rotary embedding
    key: Spec = _INT8
    #: format of the values
    value: Spec = _INT8
    #: at least so many of the last tokens stay exact
    window: int = BLOCK
    #: keys are stored less their mean over the first 128 tokens, which is added to them again when they are
    #: read: softmax ignores what all keys share, and a format need not hold it
    center: bool = True
    #: which of "key" and "value" go through a Hadamard transform of each head: "none", "key", "value", "both"
    rotate: str = "none"

    def __post_init__(self) -> None:
        if type(self.window) is int and self.window < 0:
            raise ConfigError(f"window={self.window}: use a number of tokens, 0 for none")
        if self.rotate not in _ROTATIONS:
            raise ConfigError(
                f"rotate={self.rotate!r} is unknown; use one of {', '.join(_ROTATIONS)}"
            )

    def check(self) -> None:
        """Check the formats.

        Raises:
            UnknownNameError: nobody registered a number format or a layout.
            ConfigError: scales are of blocks that 128 tokens do not consist of, or a format has activations,
                input steps or a static scale.
        """
        for name, spec in (("key", self.key), ("value", self.value)):
            registry.dtypes.get(spec.dtype)
            registry.layouts.get(spec.layout)
            tokens = (1, *spec.block)[-2]
            if tokens == WHOLE or BLOCK % tokens or len(spec.block) > 2:
                raise ConfigError(
                    f"{name}={spec}: blocks of {spec.block}; use (tokens, elements), where tokens divides "
                    f"{BLOCK}, the tokens that are quantized together"
                )
            if spec.act is not None or spec.input or spec.is_static:
                raise ConfigError(
                    f"{name}={spec}: use a format without activations, input steps and static scales; "
                    "rotate='both' rotates keys and values"
                )

    def formats(self, key_dim: int, value_dim: int) -> tuple[Spec, Spec]:
        """The formats of keys and values for heads of these sizes, with the rotation as an input step."""
        both = []
        for name, spec, size in (("key", self.key, key_dim), ("value", self.value, value_dim)):
            rotated = self.rotate in (name, "both")
            steps = (hadamard_step(largest_block(size)),) if rotated else ()
            both.append(spec if spec.input == steps else replace(spec, input=steps))
        return both[0], both[1]


#: name -> configuration. Not recipes of `quantize_`: they are for no parameter of a model
KV_RECIPES: dict[str, KVCacheConfig] = {
    "kv8": KVCacheConfig(),
    "k8v4": KVCacheConfig(value=_UINT4_GROUP, rotate="value"),
    "kv4": KVCacheConfig(_UINT4_CHANNEL, _UINT4_TOKEN, rotate="both"),
    "kv_fp8": KVCacheConfig(_FLOAT8, _FLOAT8),
}


def kv_config(config: KVCacheConfig | str) -> KVCacheConfig:
    """A configuration from itself or from a name of `KV_RECIPES`, checked.

    Raises:
        UnknownNameError: there is no such name; with a suggestion.
        ConfigError: the configuration cannot be applied.
    """
    if isinstance(config, str):
        if config not in KV_RECIPES:
            raise UnknownNameError("KV cache recipe", config, KV_RECIPES)
        config = KV_RECIPES[config]
    if not isinstance(config, KVCacheConfig):
        raise ConfigError(
            f"config={config!r}: use a KVCacheConfig or one of {', '.join(KV_RECIPES)}"
        )
    config.check()
    return config

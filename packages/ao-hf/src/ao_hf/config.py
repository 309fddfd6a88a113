"""`AoConfig`: what `from_pretrained(quantization_config=…)` takes, and what config.json says of a model.

transformers, diffusers and the pipelines of diffusers take the same class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ao_core import Config, config_to_dict, resolve_config
from ao_core.ext import ConfigError, ConfigLike, checked, shown
from ao_hf.method import FIELDS, VERSION, Method, quantization_config

try:  # transformers registers nothing else
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError:  # diffusers is there without it
    from diffusers.quantizers.quantization_config import QuantizationConfigMixin

__all__ = ["AoConfig"]


class AoConfig(QuantizationConfigMixin):
    """How transformers or diffusers shall quantize a model while it loads it.

    Args:
        config: the name of a recipe, a configuration, a `FqnToConfig`, or the form that
            `config_to_dict` gives. Configurations that need calibration data cannot be used here: load
            the model, then call `quantize_(model, config, data=batches)`.
        modules_to_not_convert: names of modules whose parameters are kept, with all that is below them;
            "lm_head" stands for every module of that name.

    Raises:
        UnknownNameError: no recipe has that name; with a suggestion.
        ConfigError: the configuration cannot work.
    """

    @checked
    def __init__(
        self, config: ConfigLike, *, modules_to_not_convert: Sequence[str] | None = None
    ) -> None:
        resolved = resolve_config(config)
        names = modules_to_not_convert or ()
        self.quant_method: Any = Method.AO
        #: in the form of `config_to_dict`, so that a model loads where the configuration is unknown
        self.config: dict[str, Any] = config_to_dict(resolved)
        self.modules_to_not_convert = list(names)

    @classmethod
    def of_dict(
        cls, config: Mapping[str, Any], modules_to_not_convert: Sequence[str] = ()
    ) -> AoConfig:
        """The same from what stands in a file or a report, without looking the configuration up."""
        self = cls.__new__(cls)
        self.quant_method = Method.AO
        self.config = dict(config)
        self.modules_to_not_convert = list(modules_to_not_convert)
        return self

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Inverse of `to_dict`.

        Raises:
            ConfigError: it is none, or was written by a newer version.
        """
        unknown = sorted(set(config_dict) - set(FIELDS))
        version = config_dict.get("version", VERSION)
        if not isinstance(version, int) or version > VERSION:
            raise ConfigError(
                f"quantization_config: version={version!r} was written by ao-core "
                f"{config_dict.get('ao_core', '?')}, and this one reads up to {VERSION}; upgrade ao-hf"
            )
        if unknown or not isinstance(config_dict.get("config"), Mapping):
            raise ConfigError(
                f"quantization_config={shown(dict(config_dict))} is not one of ao: it needs a 'config', "
                f"and knows {', '.join(FIELDS)}"
            )
        found = cls.of_dict(config_dict["config"], config_dict.get("modules_to_not_convert") or ())
        return (found, kwargs) if return_unused_kwargs else found

    def resolved(self) -> Config:
        """The configuration that `quantize_` takes."""
        return resolve_config(self.config)

    def to_dict(self) -> dict[str, Any]:
        """What stands in a config.json as `quantization_config`."""
        return quantization_config(self.config, kept=self.modules_to_not_convert)

    def to_diff_dict(self) -> dict[str, Any]:
        """What logs show of it, for diffusers without transformers."""
        return self.to_dict()

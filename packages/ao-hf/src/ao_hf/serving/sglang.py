"""Folders of ao in SGLang: `quant_method` "ao" of config.json, and the linear layers.

Written against the interfaces that SGLang publishes, and tested with a stub of them: not run in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ao_hf.method import METHOD
from ao_hf.serving.engine import Engine, config_base
from ao_hf.serving.formats import engine_name, formats_of

__all__ = ["ENGINE", "register"]

#: gives the configuration for a model; what it gives does not know the folder
_GET_CONFIG = "sglang.srt.model_loader.weight_utils.get_quant_config"
#: gives (name, tensor) of all files
_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"
_LAYERS = "sglang.srt.layers"
ENGINE = Engine(
    name="SGLang",
    version="0.5.23",
    tells=f"the hook of {_GET_CONFIG} did not run",
    config=f"{_LAYERS}.quantization.base_config:QuantizationConfig",
    method=f"{_LAYERS}.quantization.base_config:LinearMethodBase",
    unquantized=f"{_LAYERS}.quantization.unquant:UnquantizedLinearMethod",
    linear=f"{_LAYERS}.linear:LinearBase",
    head=f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead",
    embedding=f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding",
)


def register() -> None:
    """Make SGLang read folders of ao; its entry point `sglang.srt.plugins` calls this in every process."""
    from sglang.srt import server_args
    from sglang.srt.layers import quantization
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if METHOD in quantization.QUANTIZATION_METHODS:
        return
    quantization.QUANTIZATION_METHODS[METHOD] = _config_class()
    server_args.add_quantization_method_choices([METHOD])
    HookRegistry.register(_GET_CONFIG, _tell_folder, HookType.AFTER)
    HookRegistry.register(_WEIGHTS, _renamed_weights, HookType.AROUND)


def _tell_folder(config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a configuration of ao the formats of its folder."""
    if config is not None and config.get_name() == METHOD:
        config.formats = formats_of(model_config.model_path)
    return config


def _renamed_weights(
    original: Callable[..., Iterable[tuple[str, Tensor]]],
    loader: Any,
    model_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a folder of ao under the names of parameters; those of others as they are."""
    ours = getattr(model_config, "quantization", None) == METHOD
    for name, tensor in original(loader, model_config, *args, **kwargs):
        yield (engine_name(name) if ours else name), tensor


def _config_class() -> type:
    """The configuration: the folder is said by a hook."""
    base = config_base(ENGINE)

    class AoConfig(base):  # type: ignore[misc, valid-type]
        """The formats of a folder that ao wrote."""

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> AoConfig:
            """The configuration; SGLang adds to config.json's own which layers it joins."""
            made = cls()
            made.packed_modules_mapping = config.get("packed_modules_mapping") or {}
            return made

        def get_scaled_act_names(self) -> list[str]:
            """None: only AWQ has any."""
            return []

        apply_weight_name_mapper = base.rename

    return AoConfig

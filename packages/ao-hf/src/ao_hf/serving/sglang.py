"""Folders of ao in SGLang: `quant_method` "ao" of config.json, and the linear layers.

Written against the interfaces that SGLang publishes, and tested with a stub of them: not run in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ao_core.ext import CheckpointError
from ao_hf.serving.engine import Classes, ConfigMethods, linear_method, method_for
from ao_hf.serving.formats import METHOD, Formats, engine_name, formats_of

__all__ = ["register"]

#: gives the configuration for a model; what it gives does not know the folder
_GET_CONFIG = "sglang.srt.model_loader.weight_utils.get_quant_config"
#: gives (name, tensor) of all files
_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"


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
    """The configuration, a subclass of SGLang's own."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    classes = Classes(
        LinearBase,
        ParallelLMHead,
        VocabParallelEmbedding,
        UnquantizedLinearMethod,
        linear_method(LinearMethodBase),
    )

    class AoConfig(ConfigMethods, QuantizationConfig):
        """The formats of a folder that ao wrote."""

        def __init__(self, packed: dict[str, list[str]] | None = None) -> None:
            super().__init__()
            self.packed_modules_mapping = packed or {}
            self.formats: Formats | None = None

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> AoConfig:
            """The configuration; SGLang adds to config.json's own which layers it joins."""
            return cls(config.get("packed_modules_mapping"))

        def get_scaled_act_names(self) -> list[str]:
            """None: only AWQ has any."""
            return []

        def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
            """Use the names that SGLang's model has."""
            if self.formats is not None:
                self.formats = self.formats.renamed(hf_to_sglang_mapper)

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            """The method of a layer."""
            if self.formats is None:
                raise CheckpointError(
                    f"SGLang did not say which folder it loads: the hook of {_GET_CONFIG} did not run. Its "
                    "version differs from what this plugin was written for, 0.5.23"
                )
            return method_for(layer, prefix, self.formats, self.packed_modules_mapping, classes)

    return AoConfig

"""Folders of ao in vLLM: `quant_method` "ao" of config.json, and the linear layers.

Written against the interfaces that vLLM publishes, and tested with a stub of them: not run in the engine.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ao_core.ext import CheckpointError
from ao_hf.serving.engine import Classes, ConfigMethods, linear_method, method_for
from ao_hf.serving.formats import METHOD, PART, PART_IN_ENGINE, Formats, formats_of

__all__ = ["register"]


def register() -> None:
    """Make vLLM read folders of ao; its entry point `vllm.general_plugins` calls this in every process."""
    from vllm.model_executor.layers import quantization

    if METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(METHOD)(_config_class())


def _config_class() -> type:
    """The configuration, a subclass of vLLM's own."""
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.models.utils import WeightsMapper

    classes = Classes(
        LinearBase,
        ParallelLMHead,
        VocabParallelEmbedding,
        UnquantizedLinearMethod,
        linear_method(LinearMethodBase),
    )

    class AoConfig(ConfigMethods, QuantizationConfig):
        """The formats of a folder that ao wrote."""

        def __init__(self) -> None:
            super().__init__()
            self.formats: Formats | None = None

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> AoConfig:
            """The configuration; which folder it is of is said later."""
            return cls()

        def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
            """Read the formats of the folder."""
            self.formats = formats_of(model_name)

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            """Use the names that vLLM's model has."""
            if self.formats is not None:
                self.formats = self.formats.renamed(hf_to_vllm_mapper)

        @staticmethod
        def get_cache_scale_mapper() -> Any:
            """Names of parts, besides those that vLLM maps itself; its loader applies this to all names."""
            known = QuantizationConfig.get_cache_scale_mapper()
            return WeightsMapper(
                orig_to_new_regex={**known.orig_to_new_regex, PART: PART_IN_ENGINE}
            )

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            """The method of a layer."""
            if self.formats is None:
                raise CheckpointError(
                    "vLLM did not say which folder it loads (maybe_update_config was not called); "
                    "its version is older than what this plugin was written for, 0.33"
                )
            return method_for(layer, prefix, self.formats, self.packed_modules_mapping, classes)

    return AoConfig

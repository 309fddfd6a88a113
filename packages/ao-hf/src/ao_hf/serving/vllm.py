"""Folders of ao in vLLM: `quant_method` "ao" of config.json, and the linear layers.

Written against the interfaces that vLLM publishes, and tested with a stub of them: not run in the engine.
"""

from __future__ import annotations

from typing import Any

from ao_hf.method import METHOD
from ao_hf.serving.engine import Engine, config_base
from ao_hf.serving.formats import PART, PART_IN_ENGINE, formats_of

__all__ = ["ENGINE", "register"]

_LAYERS = "vllm.model_executor.layers"
ENGINE = Engine(
    name="vLLM",
    version="0.33",
    tells="maybe_update_config was not called",
    config=f"{_LAYERS}.quantization.base_config:QuantizationConfig",
    method=f"{_LAYERS}.linear:LinearMethodBase",
    unquantized=f"{_LAYERS}.linear:UnquantizedLinearMethod",
    linear=f"{_LAYERS}.linear:LinearBase",
    head=f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead",
    embedding=f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding",
)


def register() -> None:
    """Make vLLM read folders of ao; its entry point `vllm.general_plugins` calls this in every process."""
    from vllm.model_executor.layers import quantization

    if METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(METHOD)(_config_class())


def _config_class() -> type:
    """The configuration: the folder is said by `maybe_update_config`, and names of parts by a mapper."""
    from vllm.model_executor.models.utils import WeightsMapper

    base = config_base(ENGINE)

    class AoConfig(base):  # type: ignore[misc, valid-type]
        """The formats of a folder that ao wrote."""

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> AoConfig:
            """The configuration; which folder it is of is said later."""
            return cls()

        def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
            """Read the formats of the folder."""
            self.formats = formats_of(model_name)

        apply_vllm_mapper = base.rename

        @staticmethod
        def get_cache_scale_mapper() -> Any:
            """Names of parts, besides those that vLLM maps itself; its loader applies this to all names."""
            known = base.get_cache_scale_mapper()
            return WeightsMapper(
                orig_to_new_regex={**known.orig_to_new_regex, PART: PART_IN_ENGINE}
            )

    return AoConfig

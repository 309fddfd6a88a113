"""What stands in the `quantization_config` of a config.json; needs no library of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from ao_core import __version__

__all__ = [
    "FIELDS",
    "METHOD",
    "READERS",
    "VERSION",
    "Method",
    "method_of",
    "quantization_config",
    "sequence",
]

#: what `quant_method` is
METHOD = "ao"


class Method(str, Enum):
    """The same as libraries want it that read `quant_method.value`."""

    AO = METHOD


#: of this form
VERSION = 1
FIELDS = ("quant_method", "version", "ao_core", "config", "modules_to_not_convert")
#: what reads the folders of other methods, by `quant_method`
READERS = {
    "awq": "transformers with gptqmodel",
    "bitsandbytes": "transformers with bitsandbytes",
    "compressed-tensors": "transformers or vLLM with compressed-tensors",
    "fp8": "transformers",
    "gptq": "transformers with gptqmodel",
    "hqq": "transformers with hqq",
    "modelopt": "vLLM or TensorRT-LLM",
    "mxfp4": "transformers",
    "quanto": "transformers with optimum-quanto",
    "torchao": "transformers with torchao",
}


def method_of(model: Mapping[str, Any]) -> str | None:
    """By which method the configuration of a model says that it is quantized; None: by none."""
    text = model.get("text_config")
    for config in (model, text if isinstance(text, Mapping) else {}):
        present = config.get("quantization_config") or config.get("compression_config")
        if isinstance(present, Mapping):
            older = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & present.keys() else "?"
            return str(present.get("quant_method", older))
    return None


def quantization_config(
    config: Mapping[str, Any], before: Mapping[str, Any] | None = None, kept: Sequence[str] = ()
) -> dict[str, Any]:
    """The entry for a model that was quantized by a configuration, in the form of `config_to_dict`.

    Args:
        config: of what was done last.
        before: the entry of the model before that, if it was quantized by ao already.
        kept: names of modules that were not converted.
    """
    if before is not None:
        config = sequence(before["config"], config)
    entry = {
        "quant_method": METHOD,
        "version": VERSION,
        "ao_core": __version__,
        "config": dict(config),
    }
    return {**entry, "modules_to_not_convert": list(kept)} if kept else entry


def sequence(*configs: Mapping[str, Any]) -> dict[str, Any]:
    """Configurations that were applied one after the other, as reports write them."""
    return {"sequence": [step for c in configs for step in c.get("sequence", [c])]}

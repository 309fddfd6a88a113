"""Models of transformers with quantized parameters: what makes one known to transformers as such."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from ao_core import QTensor, Report
from ao_core.ext import checked
from ao_core.ext.compute import extra_tensors
from ao_hf.config import AoConfig
from ao_hf.decisions import check_quantized
from ao_hf.hub import model_of
from ao_hf.memory import show_stored
from ao_hf.method import sequence
from ao_hf.transformers.publishing import publishes

__all__ = ["attach", "follow", "learns", "mark"]


def learns(model: nn.Module) -> bool:
    """Whether quantized parameters have gradients, or their scales do: they are trained themselves."""
    quantized = any(p.requires_grad for p in model.parameters() if isinstance(p, QTensor))
    return quantized or any(extra_tensors(module) for module in model.modules())


def mark(model: Any) -> None:
    """Let a model say how it is quantized and what memory it takes, and save its parameters by their names.

    transformers would save under the names of the files that it loaded, and undo conversions for that, which
    would cut quantized parts; so it is told that there were none. What is saved gets a model card.
    """
    model._weight_conversions = []
    show_stored(model)
    publishes(model)


@checked
def attach(model: Any, config: AoConfig) -> None:
    """Tell transformers that a model is quantized by ao, so that `save_pretrained` saves it as such.

    `quantize_` does this itself for models of transformers, once ao_hf is imported.

    Raises:
        ConfigError: no parameter is quantized, or the model belongs to another method.
    """
    from ao_hf.transformers.quantizer import AoHfQuantizer

    check_quantized(model, AoHfQuantizer)
    _own_config(model)
    quantizer = AoHfQuantizer(config, pre_quantized=True)
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = config.quant_method
    quantizer.postprocess_model(model)


def _own_config(model: Any) -> None:
    """Give a model a configuration that no other model has, and all its modules the same."""
    copies: dict[int, Any] = {}
    deepcopy(model.config, copies)
    for module in model.modules():
        config = copies.get(id(getattr(module, "config", None)))
        if config is not None:
            module.config = config


def follow(model: nn.Module, report: Report | None) -> None:
    """`attach` for the models of transformers in a model that `quantize_` has changed.

    That is the model itself, or those that it wraps, as a `SentenceTransformer` does. Names in the
    configuration are then those of the wrapper. Without a report, the model is dense again, or what is
    trained has changed.
    """
    for inner in _outermost(model):
        quantized = any(isinstance(parameter, QTensor) for parameter in inner.parameters())
        if report is None:
            quantizer = getattr(inner, "hf_quantizer", None)
            if quantizer is not None and isinstance(quantizer.quantization_config, AoConfig):
                quantizer.learns = learns(inner)
                if not quantized:
                    quantizer.remove_quantization_config(inner)
            continue
        if not quantized:
            continue  # low-precision training, or another part: what is stored is dense
        before = getattr(inner.config, "quantization_config", None)
        if isinstance(before, AoConfig):
            base = getattr(getattr(inner, "hf_quantizer", None), "base_model", None)
            done = sequence(before.config, report.config)
            attach(inner, AoConfig.of_dict(done, before.modules_to_not_convert))
        else:
            base = model_of(inner.name_or_path)
            attach(inner, AoConfig.of_dict(report.config))
        inner.hf_quantizer.report, inner.hf_quantizer.base_model = report, base


def _outermost(model: nn.Module) -> list[Any]:
    """A model of transformers itself, or those that a module wraps; not those inside of one."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [inner for child in model.children() for inner in _outermost(child)]

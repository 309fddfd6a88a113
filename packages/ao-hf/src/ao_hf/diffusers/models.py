"""Models of diffusers with quantized parameters: what makes one known to diffusers as such."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from ao_core import QTensor, Report
from ao_core.ext import checked
from ao_hf.config import AoConfig
from ao_hf.decisions import check_quantized
from ao_hf.memory import show_stored
from ao_hf.method import sequence

__all__ = ["attach", "follow", "is_known", "mark"]

#: of the configuration of a model
_ENTRY = "quantization_config"


def is_known(model: object) -> bool:
    """Whether a model is one of diffusers."""
    module = sys.modules.get("diffusers.models.modeling_utils")
    return module is not None and isinstance(model, module.ModelMixin)


@checked
def attach(model: Any, config: AoConfig) -> None:
    """Tell diffusers that a model is quantized by ao, so that `save_pretrained` saves it as such.

    `quantize_` does this itself for models of diffusers, once ao_hf is imported.

    Raises:
        ConfigError: no parameter is quantized, or the model belongs to another method.
    """
    from ao_hf.diffusers.quantizer import AoDiffusersQuantizer

    check_quantized(model, AoDiffusersQuantizer)
    model.hf_quantizer = AoDiffusersQuantizer(config, pre_quantized=True)
    model.quantization_method = config.quant_method
    model.register_to_config(**{_ENTRY: config})
    mark(model)


def mark(model: Any) -> None:
    """Let a model say how it is quantized and what memory it takes, and let diffusers cast it.

    `is_quantized` means to diffusers that a model refuses `.to(dtype)`, which its `save_lora_adapter` calls.
    """
    model.is_quantized = False
    show_stored(model)


def _forget(model: Any) -> None:
    """Take away what a model says of its quantization, since it is dense."""
    kept = {name: value for name, value in model.config.items() if name != _ENTRY}
    model._internal_dict = type(model.config)(kept)
    model.__dict__.pop("quantization_method", None)


def follow(model: nn.Module, report: Report | None) -> None:
    """`attach` for a model that `quantize_` has changed, where it is one of diffusers.

    Without a report, it is dense again, or what is trained has changed.
    """
    if not is_known(model):
        return
    known: Any = model
    before = known.config.get(_ENTRY)
    if not any(isinstance(parameter, QTensor) for parameter in model.parameters()):
        # after low-precision training what is stored is dense, too
        if report is None and before is not None:
            _forget(known)
        return
    if report is None:
        return
    if isinstance(before, Mapping):  # which saving makes of it
        before = AoConfig.from_dict(before)
    if before is None:
        attach(model, AoConfig.of_dict(report.config))
        return
    done = sequence(before.config, report.config)
    attach(model, AoConfig.of_dict(done, before.modules_to_not_convert))

"""The transforms of ao-quant: from a dense parameter to a quantized one, by its role."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import Config, Skip, Spec, Target, Transform
from ao_core.ext import (
    WeightConfig,
    apply_weight_config,
    quantize_values,
    quantize_weight,
    registry,
)
from ao_quant import configs as c
from ao_quant.configs import CALIBRATED, CONFIGS
from ao_quant.configs.qat import LoRAQATConfig, QATConfig
from ao_quant.gguf.encode import encode
from ao_quant.qat.transform import apply_qat, qat_head

__all__ = ["TRANSFORMS"]

#: of inputs of the suites, which are Gaussian
_ACT_SCALE = 0.03


def _apply_gguf(dense: Tensor, config: c.GGUFWeightOnlyConfig, target: Target) -> Tensor | Skip:
    """The weight in blocks of GGUF, which have encoders of their own."""
    return quantize_weight(
        dense, config.weight_format(dense.dtype), target, partial(encode, config.type)
    )


def _apply_trellis(
    dense: Tensor, config: c.TrellisWeightOnlyConfig, target: Target
) -> Tensor | Skip:
    """The weight on a trellis, rotated in blocks that follow its shape."""
    if dense.dim() != 2 or not isinstance(target.module, nn.Linear):
        kind = type(target.module).__name__
        return Skip(f"a trellis holds weights of linear layers, and this one is of a {kind}")

    def encode(values: Tensor, spec: Spec) -> Tensor:
        return quantize_values(values, config.rotated(spec, values.shape[-1]))

    return quantize_weight(dense, config.weight_format(dense.dtype), target, encode)


def for_head(config: WeightConfig) -> Config | None:
    """int8 with one scale per row, if the format of the weights has fewer than 8 bits."""
    return c.Int8WeightOnlyConfig() if _bits(config) < 8 else None


def _gguf_head(config: c.GGUFWeightOnlyConfig) -> Config | None:
    """The same in a format that a GGUF file holds."""
    return c.GGUFWeightOnlyConfig("q8_0") if _bits(config) < 8 else None


def _bits(config: WeightConfig) -> int:
    return registry.dtypes.get(config.weight_format(torch.float32).spec.dtype).bits


#: transforms that do more than to choose scales
_APPLY: dict[str, Any] = {"gguf_weight_only": _apply_gguf, "trellis_weight_only": _apply_trellis}
_FOR_HEAD = {"gguf_weight_only": _gguf_head}

TRANSFORMS: tuple[Transform, ...] = (
    *(
        Transform(
            cls,
            name,
            cls.version,
            _APPLY.get(name, apply_weight_config),
            for_head=_FOR_HEAD.get(name, for_head),
        )
        for name, cls in CONFIGS.items()
    ),
    *(
        Transform(
            cls,
            name,
            cls.version,
            apply_weight_config,
            example=cls(act_scale=_ACT_SCALE),
            for_head=for_head,
        )
        for name, cls in CALIBRATED.items()
    ),
    Transform(QATConfig, "qat", QATConfig.version, apply_qat, for_head=qat_head),
    Transform(LoRAQATConfig, "lora_qat", LoRAQATConfig.version, apply_qat, for_head=qat_head),
)

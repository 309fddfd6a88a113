"""Scales alone are trained, while the codes of quantized weights stay."""

from __future__ import annotations

import torch
from torch import nn

from ao_core import QTensor
from ao_core.ext import ConfigError
from ao_core.ext.compute import extra_tensors, give_extras, rescaled, take_extras, trainable_scale
from ao_core.ext.quantizing import tell
from ao_quant.qat.transform import check_learned

__all__ = ["store_scales_", "train_scales_"]


def train_scales_(model: nn.Module) -> list[nn.Parameter]:
    """Let the scales of quantized linear layers be trained: each becomes a parameter `weight_scale`, float32.

    The second phase of EfficientQAT (Chen et al. 2024, arXiv:2407.11062, section 3.3). Weights stay in their
    codes, of which there is no dense copy; forward passes compute with the scales as they will be stored, by
    the kernels of the format. All other parameters of the model are frozen.

    Args:
        model: quantized by any configuration, in place. It needs `nn.Linear` itself, and formats with one
            plain scale per block; other layers stay as they are.

    Returns:
        The scales, for an optimizer.

    Raises:
        ConfigError: no layer has scales that can be trained; with the reason of the first.
    """
    found: dict[int, tuple[list[nn.Module], torch.Tensor]] = {}
    reasons: list[str] = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if type(module) is not nn.Linear or not isinstance(weight, QTensor):
            continue
        scale = trainable_scale(weight)
        if isinstance(scale, str):
            reasons.append(f"{name}.weight: {scale}")
        else:
            found.setdefault(id(weight), ([], scale))[0].append(module)
    if not found:
        reason = reasons[0] if reasons else "quantize it first; see BlockQATConfig and GPTQConfig"
        raise ConfigError(f"model: none of its linear layers has scales to train: {reason}")
    model.requires_grad_(False)
    scales = []
    for modules, scale in found.values():
        scales.append(nn.Parameter(scale.detach().clone()))
        for module in modules:
            give_extras(module, {"scale": scales[-1]})
    tell(model)
    return scales


@torch.no_grad()
def store_scales_(model: nn.Module) -> None:
    """Put the scales that were trained into the quantized weights; the model computes as before.

    Raises:
        ConfigError: `train_scales_` was not called, or a scale is not finite, or is 0, or is negative in a
            format with zero points. The model is as it was then.
    """
    changes = []
    for name, module in model.named_modules():
        extras = extra_tensors(module)
        weight = getattr(module, "weight", None)
        if "scale" not in extras or not isinstance(weight, QTensor):
            continue
        scale = extras["scale"]
        check_learned(f"{name}.weight", "scale", scale, weight.spec)
        changes.append((module, nn.Parameter(rescaled(weight, scale), requires_grad=False)))
    if not changes:
        raise ConfigError("model: no scale is trained; call train_scales_ before")
    for module, weight in changes:
        take_extras(module)
        module.weight = weight
    tell(model)

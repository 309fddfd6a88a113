"""The configuration of quantization-aware training."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.ext import ConfigError
from ao_quant.configs.algorithms import BaseConfig
from ao_quant.configs.base import one_of

__all__ = ["BACKWARD", "LORA_MODES", "SCALES", "STEPS", "LoRAQATConfig", "QATConfig"]

#: the values of `QATConfig.step`
STEPS = ("prepare", "convert")
#: the values of `QATConfig.scales`
SCALES = ("chosen", "learned", "stretched", "clipped")

#: the values of `QATConfig.backward`
BACKWARD = ("high_precision", "float8")
#: the values of `LoRAQATConfig.mode`
LORA_MODES = ("base", "merged")


@dataclass(frozen=True)
class QATConfig(BaseConfig):
    """Quantization-aware training: a model is trained while it computes as the quantized model will.

    With `step="prepare"`, weights stay dense parameters, which optimizers, FSDP2 and checkpoints know. Each
    forward pass rounds them to `base` and multiplies with the kernels of the quantized model, so its result
    is that of the quantized model, bit for bit. Gradients pass the rounding straight through. With
    `step="convert"` weights become what the last forward pass rounded them to.

    Attributes:
        step: "prepare", before the training, or "convert", after it.
        scales: "chosen": from the weights, in each forward pass, by the scale method of the base. The others
            are parameters of the layer, trained together with `weight`, for weights of `nn.Linear` in
            formats with one plain scale per block:
            "learned": a scale (LSQ, Esser et al. 2020, arXiv:1902.08153), and in formats with zero points an
            offset (LSQ+, Bhalgat et al. 2020, arXiv:2004.09576);
            "stretched": a scale of 3 or 4 levels evenly around 0 (SEQ, Liu et al. 2025, arXiv:2502.02631);
            "clipped": factors of the range of the weights (Shao et al. 2023, arXiv:2308.13137).
        backward: "high_precision", or "float8": both matmuls of the backward pass of linear layers have
            operands in float8 with one scale per row, e5m2 for gradients and e4m3 for others.
    """

    step: str = "prepare"
    scales: str = "chosen"
    backward: str = "high_precision"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "step", STEPS)
        one_of(self, "scales", SCALES)
        one_of(self, "backward", BACKWARD)


@dataclass(frozen=True)
class LoRAQATConfig(BaseConfig):
    """Adapters of linear layers that are trained while weights are rounded: W is frozen, s B A is trained.

    The prepared model computes what the converted one will, bit for bit. Layers have the parameters
    `weight_a` (rank, K) and `weight_b` (N, rank), with s = alpha / rank (LoRA, Hu et al. 2021,
    arXiv:2106.09685); A begins as PEFT's does, from torch's generator, and B as zeros.

    Attributes:
        step: "prepare", before the training, or "convert", after it.
        mode: what is stored in the end: "base", W in its format and s B A separately, in bfloat16; or
            "merged", W + s B A in the format. Training rounds the same values.
        rank: of the adapters, below both sides of the weight.
        alpha: the s of all layers is alpha / rank.
    """

    step: str = "prepare"
    mode: str = "base"
    rank: int = 16
    alpha: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "step", STEPS)
        one_of(self, "mode", LORA_MODES)
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank!r}: use 1 or more, such as 16")
        if not self.alpha > 0:
            raise ConfigError(f"alpha={self.alpha!r}: must be positive, e.g. 16.0")

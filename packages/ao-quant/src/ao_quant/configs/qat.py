"""The configuration of quantization-aware training."""

from __future__ import annotations

from dataclasses import dataclass

from ao_quant.configs.algorithms import BaseConfig
from ao_quant.configs.base import one_of

__all__ = ["SCALES", "STEPS", "QATConfig"]

#: the values of `QATConfig.step`
STEPS = ("prepare", "convert")
#: the values of `QATConfig.scales`
SCALES = ("chosen", "learned", "stretched", "clipped")


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
            are parameters of the layer that are trained beside `weight`, for weights of `nn.Linear` in
            formats with one plain scale per block:
            "learned": a scale (LSQ, Esser et al. 2020, arXiv:1902.08153), and in formats with zero points an
            offset (LSQ+, Bhalgat et al. 2020, arXiv:2004.09576);
            "stretched": a scale of 3 or 4 levels evenly around 0 (SEQ, Liu et al. 2025, arXiv:2502.02631);
            "clipped": factors of the range of the weights (Shao et al. 2023, arXiv:2308.13137).
    """

    step: str = "prepare"
    scales: str = "chosen"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "step", STEPS)
        one_of(self, "scales", SCALES)

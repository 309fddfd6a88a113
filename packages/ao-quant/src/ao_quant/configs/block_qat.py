"""The configuration of training block by block."""

from __future__ import annotations

from dataclasses import dataclass

from ao_core.ext import ConfigError
from ao_quant.configs.algorithms import BaseConfig
from ao_quant.configs.base import one_of
from ao_quant.configs.qat import SCALES

__all__ = ["BlockQATConfig"]


@dataclass(frozen=True)
class BlockQATConfig(BaseConfig):
    """Block-wise training: the weights of a block and their scales learn to return what the block returned.

    The first phase of EfficientQAT (Chen et al. 2024, arXiv:2407.11062, section 3.2), for any format. The
    loss is the mean squared error between what a block of the model, such as a layer of a transformer,
    returns with rounded weights and what it returned in the original model. Inputs are those that the
    quantized blocks before it make. Adam's steps fall linearly to 0. Where the loss over all data has not
    fallen at the end, the start is kept, which is rounding to nearest. Weights in no block are trained layer
    by layer, by the squared error of the layer's outputs.

    `ao_quant.qat.train_scales_` is the second phase.

    Attributes:
        scales: as in `QATConfig`; those of convolutions are always "chosen".
        epochs: how often all data is used.
        lr: the first step size of weights.
        scales_lr: the first step size of learned scales and other extra tensors.
        seed: of the order in which batches are used.
    """

    scales: str = "learned"
    epochs: int = 2
    lr: float = 1e-4
    scales_lr: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "scales", SCALES)
        if self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs!r}: use 1 or more, such as 2")
        for name in ("lr", "scales_lr"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be positive, e.g. 0.0001")

"""The `Trainer` of transformers: ao's optimizers by name, and conversions of its model as callbacks."""

from __future__ import annotations

from ao_hf.training.callbacks import Conversion, low_precision_training
from ao_hf.training.optimizers import optimizer

__all__ = ["Conversion", "low_precision_training", "optimizer"]

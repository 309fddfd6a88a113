"""Callbacks that convert the model of a `Trainer`, for low-precision and for sparse training."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from ao_core import quantize_
from ao_core.ext import ConfigError, ConfigLike
from ao_core.ext.compute import unwrap_
from ao_core.ext.quantizing import FilterFn

__all__ = ["Conversion", "low_precision_training"]


class Conversion(transformers.TrainerCallback):
    """Converts the model when the `Trainer` is made, and, if asked, back when training ends.

    That is the only moment before optimizers, DDP, FSDP2 and `torch.compile` see the parameters.
    So the callback must be given to the Trainer when it is made: ``Trainer(…, callbacks=[…])``.

    Args:
        convert: changes a model in place: `quantize_` with a configuration, or what swaps in the layers of
            sparse training.
        restore: changes it back after `Trainer.train`; None: it stays as it is.
    """

    def __init__(
        self,
        convert: Callable[[nn.Module], object],
        restore: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.convert, self.restore = convert, restore
        #: what `convert` returned: the report of a low-precision conversion
        self.result: object = None
        self._converted: weakref.ref[nn.Module] | None = None

    def on_init_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Convert."""
        model: nn.Module = kwargs["model"]
        self.result = self.convert(model)
        self._converted = weakref.ref(model)

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Raise `ConfigError` where the model that is trained is not the one that was converted."""
        if self._converted is None or self._converted() is not kwargs["model"]:
            raise ConfigError(
                "the model was not converted: this callback does so when the Trainer is made, so give it in "
                "Trainer(callbacks=[...]); where model_init makes the model, convert it there; for another "
                "training of a model that was restored, make another Trainer"
            )

    def on_train_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Convert back, where that was asked for."""
        if self.restore is not None:
            self.restore(kwargs["model"])
            self._converted = None


def low_precision_training(
    config: ConfigLike,
    filter_fn: FilterFn | None = None,
    *,
    strict: bool = False,
    restore: bool = False,
) -> Conversion:
    """A callback for training with low-precision matmuls: float8, MX, int8, 4-bit floats, BitNet.

    Weights stay in high precision, and checkpoints hold them as a dense model has them.

    Args:
        config: a configuration or the name of a recipe of training, such as "float8/rowwise".
        filter_fn: (module, its name) -> whether its weights are converted; None: as `quantize_` decides.
        strict: raise where a weight that was asked for could not be converted.
        restore: give the model ordinary parameters again when training ends.
    """

    def convert(model: nn.Module) -> object:
        return quantize_(model, config, filter_fn, strict=strict)

    return Conversion(convert, unwrap_ if restore else None)

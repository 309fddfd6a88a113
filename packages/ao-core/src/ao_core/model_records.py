"""The records of transforms of a whole model, which come before its weights are quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ao_core.arguments import check_fields

if TYPE_CHECKING:
    from ao_core.config import Config
    from ao_core.targets import Decision
    from ao_core.tensor.chosen_steps import ChosenSteps

__all__ = ["ModelTransform", "Prepared"]


@dataclass(frozen=True)
class Prepared:
    """What a `ModelTransform` made of a model."""

    #: the copy that it was given, or another copy, with other parameters (or buffers) where they change
    model: torch.nn.Module
    #: by the name of a weight, input steps that it is stored with once it is quantized
    steps: Mapping[str, ChosenSteps] = field(default_factory=dict)
    #: by the name of a parameter, what was done to it, or why nothing could be
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ModelTransform:
    """What `quantize_(model, [config, ...], data=batches)` does to a dense model before it is quantized.

    The model computes the same afterwards: whoever writes one proves it by outputs, see `ao_core.ext.graph`.
    """

    #: the lowercase name, which is also a recipe name
    name: str
    #: the class of configuration, exactly: none of its subclasses
    config_type: type[Config]
    #: (a copy of the model that shares its parameters, which must not be changed in place; the weights that
    #: are going to be quantized, each with the configuration for that, if it is known; batches of data;
    #: configuration) -> what was made of it. The modules of the weights are those of the copy.
    apply: Callable[[torch.nn.Module, Sequence[Decision], Sequence[Any], Any], Prepared]
    #: configuration -> what is then applied to the same weights; None: the next configuration of the list
    then: Callable[[Any], Config | None] = lambda config: None
    #: (configuration, those before it in the list) -> None, or why it makes no sense after them
    refuses: Callable[[Any, Sequence[Config]], str | None] = lambda config, before: None

    def __post_init__(self) -> None:
        check_fields(self)

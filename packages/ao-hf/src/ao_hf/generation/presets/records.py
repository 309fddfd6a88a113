"""What a preset is: how a model of known sizes is made, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Forward", "Preset"]


@dataclass(frozen=True)
class Forward:
    """What is measured of a model that generates no text: one forward pass.

    Attributes:
        unit: what a pass makes for each of its batch: an "image", or a "step" of a picture that is drawn.
        inputs: (model, batch) -> arguments of `forward`, random, in the dtype and on the device of the model.
    """

    unit: str
    inputs: Callable[[Any, int], dict[str, Any]]


@dataclass(frozen=True)
class Preset:
    """The shape of a model.

    Attributes:
        build: makes a model in a dtype, whose sizes are those that the authors published. Parameters that it
            makes are moved to the meta device at once, so it takes no memory.
        forward: the pass that is measured; None: the model generates text.
    """

    build: Callable[[torch.dtype], Any]
    forward: Forward | None = None

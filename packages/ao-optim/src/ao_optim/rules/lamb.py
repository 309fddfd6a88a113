"""LAMB (You et al. 2020, arXiv 1904.00962): Adam's direction, as long as the parameter times lr."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ao_optim.rules.adam import ADAM, adam_direction
from ao_optim.rules.base import Options, State, add_decay

__all__ = ["LAMB"]


def _update(param: Tensor, grad: Tensor, state: State, options: Options, step: Any) -> None:
    change = add_decay(adam_direction(grad, state, options, step), param, options)
    length, wanted = change.norm(), param.norm()
    # a parameter or a direction of 0 has no ratio
    ratio = torch.where((length > 0) & (wanted > 0), wanted / length, torch.ones_like(length))
    param.sub_(change * (ratio * options["lr"]))


LAMB = replace(
    ADAM,
    name="lamb",
    defaults={**ADAM.defaults, "eps": 1e-6, "weight_decay": 0.01},
    update=_update,
    elementwise=False,
)

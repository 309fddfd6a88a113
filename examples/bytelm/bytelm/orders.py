"""Models whose linear layers take their inputs in another order: the same function, other groups."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn


def reordered(model: nn.Module, seed: int) -> nn.Module:
    """A copy that computes the same, the columns of each weight in a random order of its own.

    The weights that share a scale are neighbours in a row, and which ones are is an accident of
    training: any order of a layer's inputs gives the same function once the columns follow it.
    Quantizing copies in several orders tells what belongs to the size of the groups from what
    belongs to the neighbours of one checkpoint.

    Args:
        model: its `nn.Linear` modules are reordered, in the order of `modules()`.
        seed: of the random orders.
    """
    generator = torch.Generator().manual_seed(seed)
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(module, nn.Linear):
            order = torch.randperm(module.in_features, generator=generator)
            module.weight = nn.Parameter(module.weight.detach()[:, order], requires_grad=False)
            module.register_forward_pre_hook(partial(_take, order))
    return made


def _take(order: Tensor, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Before the forward of a linear layer: its inputs in the order of its columns."""
    return inputs[0][..., order]

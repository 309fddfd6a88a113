"""Pruning within another default device: what is computed stays where the weights are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ao_sparsity import NofM, apply_masks, prune_magnitude, prune_sparsegpt, prune_wanda


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_pruning_under_a_default_device(method: str) -> None:
    found = []
    for device in ("cpu", "meta"):
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 16, bias=False))
        model[0].weight.data = torch.randn(16, 32, generator=generator)
        data = [torch.randn(64, 32, generator=generator)]
        with torch.device(device):
            if method == "magnitude":
                masks = prune_magnitude(model, NofM(2, 4))
            elif method == "wanda":
                masks = prune_wanda(model, data, NofM(2, 4))
            else:
                masks = prune_sparsegpt(model, data, NofM(2, 4))
            apply_masks(model, masks)
        found.append(model[0].weight.detach())
    assert torch.equal(*found)
    assert 0.4 < float((found[0] == 0).float().mean()) < 0.6

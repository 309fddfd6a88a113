"""The images, and a model that learns them within a minute."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from digits.model import Sizes, ViT

__all__ = ["Images", "load", "train"]

_BATCH, _RATE = 64, 2e-3
#: of the images, kept for the measure
_HELD_OUT = 500


class Images(NamedTuple):
    """Pixels (B, 8, 8) from 0 to 1, and what each shows."""

    pixels: Tensor
    labels: Tensor


def load() -> tuple[Images, Images]:
    """To learn, and held out: always the same."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.from_numpy(found.images).float() / 16
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = order[_HELD_OUT:], order[:_HELD_OUT]
    learn, held_out = (Images(pixels[part], labels[part]) for part in parts)
    return learn, held_out


@torch.enable_grad()
def train(images: Images, seed: int, epochs: int = 30, sizes: Sizes | None = None) -> ViT:
    """A model for inference; the seed is that of its first weights and of the order of images."""
    generator = torch.Generator().manual_seed(seed)
    model = ViT(sizes)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
        elif parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    steps = epochs * (len(images.labels) // _BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(images.labels), generator=generator)
        for part in order[: steps // epochs * _BATCH].split(_BATCH):
            loss = F.cross_entropy(model(images.pixels[part]), images.labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval().requires_grad_(False)

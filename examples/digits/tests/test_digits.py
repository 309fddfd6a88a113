"""Patches are where they belong, and training learns, the same for the same seed."""

from __future__ import annotations

import torch
from digits.model import Sizes, ViT
from digits.train import Images, train

SMALL = Sizes(width=16, hidden=32, blocks=1, heads=2, classes=2)


def test_patches_are_squares_of_the_image() -> None:
    torch.manual_seed(0)
    seen: list[torch.Tensor] = []
    model = ViT(SMALL)
    model.embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    images = torch.arange(2 * 64.0).view(2, 8, 8)
    assert model(images).shape == (2, 2)
    (patches,) = seen
    assert patches.shape == (2, 16, 4)
    assert patches[0, 0].tolist() == [0, 1, 8, 9]
    assert patches[0, 1].tolist() == [2, 3, 10, 11]
    assert patches[1, 4].tolist() == [80, 81, 88, 89]


def test_training_learns_and_is_repeatable() -> None:
    """Bright above, or bright below: nothing else tells them apart."""
    torch.manual_seed(0)
    labels = torch.arange(128) % 2
    pixels = torch.rand(128, 8, 8) / 2
    pixels[labels == 1, :4] += 0.5
    images = Images(pixels, labels)
    first, again, other = (train(images, seed, 40, SMALL) for seed in (0, 0, 1))
    with torch.no_grad():
        assert (first(pixels).argmax(-1) == labels).float().mean() > 0.95
        assert torch.equal(first(pixels), again(pixels))
        assert not torch.equal(first(pixels), other(pixels))
    assert not first.training
    assert not any(p.requires_grad for p in first.parameters())

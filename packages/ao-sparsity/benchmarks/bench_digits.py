"""Accuracy of a small vision transformer on scikit-learn's digits, dense and block-sparse."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import ao_sparsity
from benchmarking import arguments, record

#: of the vision transformer: patches of 2 × 2 pixels, width, heads, blocks
PATCH, WIDTH, HEADS, DEPTH = 2, 64, 4, 2
BATCH, LR = 64, 2e-3


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nn.Module):
    """Images (B, 8, 8) -> ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn((8 // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tiles = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
        x = self.embed(tiles.flatten(3).flatten(1, 2)) + self.place
        return self.head(self.norm(self.blocks(x).mean(1)))


def make_sparse(model: VisionTransformer, blocksize: int) -> None:
    """Let the linear layers of the blocks learn which blocks stay; embedding and head are dense."""
    layer = partial(ao_sparsity.SupermaskLinear, blocksize=blocksize)
    names = [name for name, m in model.blocks.named_modules() if isinstance(m, nn.Linear)]
    ao_sparsity.swap_linear_with_semi_sparse_linear(model.blocks, dict.fromkeys(names, layer))


def train(sparsity: float, seed: int, args: Any) -> dict[str, float]:
    """Accuracy on the images that were held out, and the zeros of the sparse layers, in percent."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float() / 8 - 1, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, rest = order[: args.held_out], order[args.held_out :]
    torch.manual_seed(seed)
    model = VisionTransformer()
    if sparsity:
        make_sparse(model, args.blocksize)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    steps = args.epochs * (len(rest) // BATCH)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, cycle_momentum=False)
    schedule = ao_sparsity.CubicSchedule(sparsity, end=steps // 2)
    batches = torch.Generator().manual_seed(seed)
    for step in tqdm(range(steps), desc=f"{sparsity:g}, seed {seed}", leave=False):
        if sparsity:
            ao_sparsity.set_sparsity(model, schedule(step))
        chosen = rest[torch.randint(len(rest), (BATCH,), generator=batches)]
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    shares = ao_sparsity.squash_masks(model)
    with torch.no_grad():
        right = (model.eval()(images[test]).argmax(1) == labels[test]).float().mean()
    return {"accuracy": 100 * float(right), "zeros": 100 * mean(shares.values() or [0.0])}


def main() -> None:
    args = arguments(__doc__, seeds=3, epochs=60, held_out=450, sparsity=0.9, blocksize=8)
    shares = {"dense": 0.0, f"{args.sparsity:.0%} of the blocks gone": args.sparsity}
    runs = {
        name: [train(share, seed, args) for seed in range(args.seeds)]
        for name, share in shares.items()
    }
    means = {name: mean(run["accuracy"] for run in found) for name, found in runs.items()}
    rows = [
        {
            "layers": name,
            "zeros, %": f"{mean(run['zeros'] for run in found):.1f}",
            **{f"seed {seed}": f"{run['accuracy']:.2f}" for seed, run in enumerate(found)},
            "mean": f"{means[name]:.2f}",
            "to dense": f"{means[name] - means['dense']:+.2f}",
        }
        for name, found in runs.items()
    ]
    record(
        args.json,
        "Accuracy of a block-sparse vision transformer",
        f"scikit-learn's digits, {args.held_out} images of 8 × 8 held out: accuracy in percent of a vision "
        f"transformer of {DEPTH} blocks of width {WIDTH}, trained for {args.epochs} epochs from the same "
        "first weights on the same batches. All linear layers of its blocks are `SupermaskLinear`s with "
        f"blocks of {args.blocksize} × {args.blocksize}; they go one after the other in the first half of "
        "training, and for good at its end.",
        rows,
    )


if __name__ == "__main__":
    main()

"""Block-sparse training: which blocks of a weight stay is learned beside the weight."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.ext import BLOCKSIZE, ConfigError, checked
from ao_sparsity.masks import block_scores, spread_blocks
from ao_sparsity.train.linear import SparseLinear

__all__ = ["SupermaskLinear", "set_sparsity"]


class SupermaskLinear(SparseLinear):
    """Multiplies with the blocks of its weight whose scores are greatest; the scores are learned.

    Each block has a score, a parameter that begins as the block's L2 norm over the mean of all. The
    gradient goes straight through the choice: a score gets the gradient of a factor in front of its
    block, kept or not (Ramanujan et al. 2020, arXiv:1911.13299; in blocks, and with the weights trained
    too, as SuperBlock does). Weights have a gradient in the blocks that stay; `weight.requires_grad_(False)`
    trains the choice alone. Make the optimizer after the layer, so that it has the scores.

    The options are `blocksize`, the rows and columns of a block (those at the edges may be smaller), and
    `sparsity`, the share of the blocks that go, rounded to the nearest whole number of them; see
    `set_sparsity`.

    Args:
        in_features: as of `nn.Linear`; of any size.
        out_features: the same.
        bias: the same.
        device: the same.
        dtype: the same.

    Raises:
        ConfigError: a `blocksize` below 1 or another than before, a `sparsity` outside 0 to 1.
    """

    blocksize: int
    scores: nn.Parameter
    #: how many blocks stay, in a tensor: compiled code reads it, and checkpoints have it
    kept: Tensor

    @classmethod
    def check(cls, module: nn.Module, **options: Any) -> None:
        """Raise `ConfigError` where a module cannot become one of this class with these options."""
        super().check(module, **options)
        known, asked = getattr(module, "blocksize", None), options.get("blocksize", BLOCKSIZE)
        if known not in (None, asked):
            raise ConfigError(f"blocksize={asked}: its scores are of blocks of {known}")

    def setup(self, blocksize: int = BLOCKSIZE, sparsity: float = 0.0) -> None:
        """Take the options; scores that are there already stay.

        Args:
            blocksize: rows and columns of a block.
            sparsity: the share of the blocks that goes, 0 to 1.

        Raises:
            ConfigError: `blocksize` is not positive, or `sparsity` not in 0 to 1.
        """
        if blocksize < 1:
            raise ConfigError(f"blocksize={blocksize}: a block has at least one row and column")
        if not hasattr(self, "scores"):
            norms = block_scores(self.weight.detach(), (blocksize, blocksize))
            mean = norms.mean().clamp(min=torch.finfo(norms.dtype).tiny)
            self.scores = nn.Parameter((norms / mean).to(self.weight.dtype))
            self.register_buffer("kept", torch.tensor(0, device=self.weight.device))
        self.blocksize = blocksize
        self.set_sparsity(sparsity)

    def teardown(self) -> None:
        """Drop scores and options."""
        del self.scores, self.kept, self.blocksize

    def set_sparsity(self, sparsity: float) -> None:
        """Let another share of the blocks go, from the next call on.

        Raises:
            ConfigError: `sparsity` is not in 0 to 1.
        """
        if not 0 <= sparsity <= 1:
            raise ConfigError(f"sparsity={sparsity}: need a share from 0 to 1")
        blocks = ceil(self.out_features / self.blocksize) * ceil(self.in_features / self.blocksize)
        self.kept.fill_(blocks - round(sparsity * blocks))

    def block_mask(self) -> Tensor:
        """True for the blocks that stay, in the shape of `scores`; of equal scores the first."""
        order = self.scores.detach().flatten().argsort(descending=True, stable=True)
        ranks = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        return (ranks < self.kept).view(self.scores.shape)

    def effective_weight(self) -> Tensor:
        """The weight with the other blocks as zeros; gradients reach weight and scores."""
        # the scores add nothing to the value, but have the gradient of the factor
        factor = self.block_mask().to(self.scores.dtype) + (self.scores - self.scores.detach())
        block = (self.blocksize, self.blocksize)
        return self.weight * spread_blocks(factor, block, self.weight.shape)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return F.linear(input, self.effective_weight(), self.bias)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return f"{super().extra_repr()}, blocksize={self.blocksize}"


@checked
def set_sparsity(model: nn.Module, sparsity: float) -> None:
    """Let another share of the blocks of every `SupermaskLinear` go, from the next call on.

    Raises:
        ConfigError: the share is not in 0 to 1, or the model has no such layer.
    """
    layers = [module for module in model.modules() if isinstance(module, SupermaskLinear)]
    if not layers:
        raise ConfigError("the model has no SupermaskLinear; swap its linear layers first")
    for layer in layers:
        layer.set_sparsity(sparsity)

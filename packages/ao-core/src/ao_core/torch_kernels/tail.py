"""The reference of the op `write_tail`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["write_tail"]


def write_tail(
    counts: Tensor,
    tail_key: Tensor,
    tail_value: Tensor,
    key: Tensor,
    value: Tensor,
    coded: int,
) -> None:
    """Rows of tokens are copied to their slots, without gradients."""
    before, held = counts.tolist()
    tokens, coded = before + key.shape[2], max(coded, held)
    first = max(before, coded)
    with torch.no_grad():
        slots = torch.arange(first, tokens, device=key.device) % tail_key.shape[2]
        tail_key.index_copy_(2, slots, key[:, :, first - before :])
        tail_value.index_copy_(2, slots, value[:, :, first - before :])
        counts.copy_(torch.tensor([tokens, coded], device=counts.device))

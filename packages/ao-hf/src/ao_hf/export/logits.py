"""A language model as one function of tensors, which is what exporters take."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["LogitsModel"]


class LogitsModel(nn.Module):
    """Token ids (batch, sequence) to logits (batch, sequence, vocabulary), without a cache and other outputs.

    A model of transformers takes and gives Python objects, and has a forward with ``**kwargs``, which
    `torch.export` traces badly. The module holds the model, and none of its tensors is copied.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of every position."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False, return_dict=True).logits
        return logits

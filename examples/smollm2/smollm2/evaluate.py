"""English text from Python's own documentation, and what a variant of a model makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: tokens in a window: each is predicted from those before it
CONTEXT = 512


@dataclass(frozen=True)
class Quality:
    """Of a variant beside the original; means over all tokens but the first of each window."""

    #: KL(original ‖ variant), nats
    kl_nats: float
    #: −log2 p(token), bits
    bits_per_token: float
    #: share of the tokens for which both find the same one likeliest
    agreement: float


def text() -> str:
    """Sections of the documentation, in the order of their names."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def spread(tokens: Tensor, count: int) -> Tensor:
    """So many windows, evenly spread over a text, (count, `CONTEXT`)."""
    starts = torch.linspace(0, len(tokens) - CONTEXT, count).long().tolist()
    return torch.stack([tokens[start : start + CONTEXT] for start in starts])


@torch.inference_mode()
def predict(model: nn.Module, windows: Tensor) -> list[Tensor]:
    """The logarithms of the probabilities of each window's tokens, (`CONTEXT` − 1, vocabulary)."""
    return [F.log_softmax(model(window[None]).logits[0, :-1].float(), dim=-1) for window in windows]


@torch.inference_mode()
def quality(
    original: Iterable[Tensor], windows: Tensor, predicted: Callable[[Tensor], list[Tensor]]
) -> Quality:
    """The quality of a variant, one window after the other, since all predictions are large."""
    sums = torch.zeros(3, dtype=torch.float64)
    for logs, window in zip(original, windows, strict=True):
        (found,) = predicted(window[None])
        kl = F.kl_div(found, logs, log_target=True, reduction="sum")
        loss = F.nll_loss(found, window[1:], reduction="sum") / torch.tensor(2.0).log()
        same = (found.argmax(-1) == logs.argmax(-1)).sum()
        sums += torch.stack([kl.double(), loss.double(), same.double()])
    return Quality(*(sums / (windows.numel() - len(windows))).tolist())

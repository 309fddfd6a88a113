"""The mask "ao_kv": which tokens of each row are not padding, in place of a mask of tokens × tokens.

Attention over a cache knows that it is causal. What it does not know is where a row starts and stops, and,
for keys that are not in a cache of ours, which token the first query is. The mask is int64 (B, 1, 1, 1, N):

    N = 1   [first query]                causal, no padding
    N = 2   [start, stop]                each query sees these tokens
    N = 3   [first query, start, stop]   causal

Five dimensions, because a model that adds such a mask to logits then fails, and computes no other numbers.
All other masks are those that "sdpa" has: windows, chunks, packed texts, holes in the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

__all__ = ["Bounds", "bounds_of", "hides", "mask", "padding_of", "visible"]


class Bounds(NamedTuple):
    """What a mask of this module says."""

    #: whether a query sees no token after its own
    causal: bool
    #: the token that the first query is, int64 (B or 1,); None unless causal
    first: Tensor | None
    #: int64 (B,), or None without padding
    start: Tensor | None
    stop: Tensor | None


def bounds_of(x: Any) -> Bounds | None:
    """The bounds that a mask holds; None for masks of another kind."""
    if not isinstance(x, Tensor) or x.dim() != 5 or x.dtype != torch.int64:
        return None
    columns = [column.contiguous() for column in x.flatten(1).unbind(1)]
    if len(columns) == 1:
        return Bounds(True, columns[0], None, None)
    if len(columns) == 2:
        return Bounds(False, None, columns[0], columns[1])
    return Bounds(True, columns[0], columns[1], columns[2])


def hides(mask: Any) -> bool:
    """Whether a mask, or one of those of layer types, may hide tokens that are there from the last one."""
    if mask is None:
        return False
    if isinstance(mask, dict):
        return any(map(hides, mask.values()))
    bounds = bounds_of(mask)
    if bounds is not None:
        return bounds.start is not None
    return mask.dim() != 2 or not bool(mask.all())


def padding_of(seen: Tensor) -> Tensor | None:
    """The mask of this module for the last token of each row, given which tokens are seen, (B, tokens).

    None where there is padding between tokens.
    """
    return _bounds(len(seen), seen.shape[1] - 1, seen, causal=True, device=seen.device)


def visible(bounds: Bounds, queries: int, tokens: int) -> Tensor:
    """The same as a mask of tokens × tokens, bool (B or 1, 1, queries or 1, tokens)."""
    some = bounds.first if bounds.start is None else bounds.start
    assert some is not None
    places = torch.arange(tokens, device=some.device)
    seen: Tensor | None = None
    if bounds.first is not None:
        own = bounds.first[:, None] + torch.arange(queries, device=some.device)
        seen = (places <= own[:, :, None])[:, None]
    if bounds.start is not None and bounds.stop is not None:
        inside = (places >= bounds.start[:, None]) & (places < bounds.stop[:, None])
        inside = inside[:, None, None]
        seen = inside if seen is None else seen & inside
    assert seen is not None
    return seen


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward; arguments are those that transformers has for each `AttentionMaskInterface`."""
    if attention_mask is not None and attention_mask.dim() == 5:
        return attention_mask  # made before, outside of compiled code
    causal = mask_function is causal_mask_function
    # a static cache with one query: nothing may be skipped there, since graphs are compiled for one mask
    fixed = isinstance(q_offset, Tensor) and q_length == 1
    wanted = allow_is_causal_skip or fixed if causal else allow_is_bidirectional_skip
    if (
        wanted
        and (causal or mask_function is bidirectional_mask_function)
        and not (use_vmap or local_size or kv_offset)
    ):
        found = _bounds(batch_size, q_offset, attention_mask, causal, device)
        if found is not None:
            same = isinstance(q_offset, int) and (q_length == 1 or kv_length == q_length)
            skips = found.shape[-1] == 1 and same if causal else found.shape[-1] == 0
            return None if skips else found
    return sdpa_mask(  # type: ignore[no-any-return]
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )


def _bounds(
    batch: int,
    first: int | Tensor,
    attention_mask: Tensor | None,
    causal: bool,
    device: torch.device | str,
) -> Tensor | None:
    """The mask in the form of this module, with N = 0 for no mask at all; None: there are holes."""
    tracing = torch.compiler.is_compiling()
    padded = attention_mask is not None and (tracing or not bool(attention_mask.all()))
    columns: list[Tensor] = []
    if padded:
        assert attention_mask is not None
        seen = attention_mask.to(torch.int64)
        start = seen.argmax(1)
        stop = seen.shape[1] - seen.flip(1).argmax(1)
        whole = (stop - start == seen.sum(1)).all()
        if tracing:
            torch._assert_async(whole, "padding between tokens; compile with a mask made before")
        elif not bool(whole):
            return None
        columns = [start, stop]
    if causal:
        if isinstance(first, Tensor):
            own = first.detach().to(device=device, dtype=torch.int64).reshape(1)
        else:
            own = torch.tensor([first], device=device)
        columns = [own.expand(batch if padded else 1), *columns]
    if not columns:
        return torch.empty(batch, 1, 1, 1, 0, dtype=torch.int64, device=device)
    return torch.stack(columns, 1)[:, None, None, None]

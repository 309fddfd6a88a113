"""The op "attend" as a custom operator of torch: one node of a graph, whose kernel is chosen when it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ao_core.tensor.attention import attend
from ao_core.tensor.leaves import Leaves, spec_of_text
from ao_core.tensor.qtensor import QTensor

__all__ = ["traced"]


@torch.library.custom_op("ao_core::attend", mutates_args=())
def _attend(
    q: Tensor,
    key: Sequence[Tensor],
    key_names: str,
    key_spec: str,
    key_shape: Sequence[int],
    value: Sequence[Tensor],
    value_names: str,
    value_spec: str,
    value_shape: Sequence[int],
    counts: Tensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    keys, values = (
        Leaves(tuple(leaves), tuple(names.split()), spec_of_text(text), tuple(shape), q.dtype, text)
        for leaves, names, text, shape in (
            (key, key_names, key_spec, key_shape),
            (value, value_names, value_spec, value_shape),
        )
    )
    return attend(
        q,
        keys,
        values,
        counts,
        tail_key=tail_key,
        tail_value=tail_value,
        center=center,
        start=start,
        stop=stop,
        sinks=sinks,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )


@_attend.register_fake
def _(
    q: Tensor,
    key: Sequence[Tensor],
    key_names: str,
    key_spec: str,
    key_shape: Sequence[int],
    value: Sequence[Tensor],
    value_names: str,
    value_spec: str,
    value_shape: Sequence[int],
    counts: Tensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    return q.new_empty((*q.shape[:3], value_shape[3]))


def traced(
    q: Tensor,
    key: QTensor | Leaves,
    value: QTensor | Leaves,
    tensors: tuple[Tensor | None, ...],
    attention: tuple[float, bool, int, float],
) -> Tensor:
    """The node in a graph that is being traced; arguments are those of `attend`, checked when it runs."""
    keys, values = (x if isinstance(x, Leaves) else Leaves.of(x) for x in (key, value))
    out: Tensor = _attend(
        q,
        list(keys.leaves),
        " ".join(keys.names),
        keys.text,
        list(keys.shape),
        list(values.leaves),
        " ".join(values.names),
        values.text,
        list(values.shape),
        *tensors,
        *attention,
    )
    return out

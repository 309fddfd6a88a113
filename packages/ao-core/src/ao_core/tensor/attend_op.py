"""The op "attend" as an operator of torch: one node of a graph, whose kernel is chosen when it runs.

It is defined by its schema, so torch's registry calls `_attend` at once: `torch.library.custom_op` would put
layers of Python around each call, which a token of a decoder pays for in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core.errors import UnsupportedOp
from ao_core.tensor.attention import NO_GRADIENT, attend
from ao_core.tensor.leaves import Leaves, spec_of_text
from ao_core.tensor.qtensor import QTensor

__all__ = ["traced"]

#: exported programs hold calls of it
_SCHEMA = (
    "attend(Tensor q, Tensor[] key, str key_names, str key_spec, SymInt[] key_shape, Tensor[] value, "
    "str value_names, str value_spec, SymInt[] value_shape, Tensor counts, Tensor? tail_key, "
    "Tensor? tail_value, Tensor? center, Tensor? start, Tensor? stop, Tensor? sinks, float scale, "
    "bool causal, SymInt window, float softcap) -> Tensor"
)


def _attend(
    q: Tensor,
    key: list[Tensor],
    key_names: str,
    key_spec: str,
    key_shape: list[int],
    value: list[Tensor],
    value_names: str,
    value_spec: str,
    value_shape: list[int],
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
    """As `attend`, which also refuses the gradient: torch's registry would only warn of it."""
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


def _fake(q: Tensor, *rest: Any) -> Tensor:
    value_shape = rest[7]
    return q.new_empty((*q.shape[:3], value_shape[3]))


_LIBRARY = torch.library.Library("ao_core", "FRAGMENT")
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("ao_core::attend", _fake, lib=_LIBRARY)
_OP = torch.ops.ao_core.attend.default


def traced(
    q: Tensor,
    key: QTensor | Leaves,
    value: QTensor | Leaves,
    tensors: tuple[Tensor | None, ...],
    attention: tuple[float, bool, int, float],
) -> Tensor:
    """The node in a graph that is being traced; arguments are those of `attend`, checked when it runs.

    Raises:
        UnsupportedOp: compiled code would need the gradient. Of exported programs, `attend` refuses it.
    """
    if q.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_exporting():
        raise UnsupportedOp(NO_GRADIENT)
    keys, values = (x if isinstance(x, Leaves) else Leaves.of(x) for x in (key, value))
    out: Tensor = _OP(
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

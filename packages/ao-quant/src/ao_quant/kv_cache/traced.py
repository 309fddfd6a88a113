"""`append_` as a custom operator of torch, which writes into its arguments: one node of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ao_core.ext.kernels import Leaves, spec_of_text
from ao_quant.kv_cache.state import QuantizedKV
from ao_quant.kv_cache.update import append_now

__all__ = ["append_traced"]


@torch.library.custom_op("ao_quant::kv_append", mutates_args=("state",))
def _append(
    state: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    size: int,
    window: int,
    centered: bool,
    key_names: str,
    key_spec: str,
    value_names: str,
    value_spec: str,
) -> None:
    counts, tail_key, tail_value, *rest = state
    center = rest.pop(0) if centered else None
    split = len(key_names.split())

    def leaves(found: list[Tensor], names: str, text: str, tail: Tensor) -> Leaves:
        shape = (*tail.shape[:2], size, tail.shape[3])
        return Leaves(
            tuple(found), tuple(names.split()), spec_of_text(text), shape, tail.dtype, text
        )

    keys = leaves(rest[:split], key_names, key_spec, tail_key)
    values = leaves(rest[split:], value_names, value_spec, tail_value)
    append_now(QuantizedKV(keys, values, tail_key, tail_value, center, counts, window), key, value)


@_append.register_fake
def _(
    state: Sequence[Tensor],
    key: Tensor,
    value: Tensor,
    size: int,
    window: int,
    centered: bool,
    key_names: str,
    key_spec: str,
    value_names: str,
    value_spec: str,
) -> None:
    return None


def append_traced(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    """The node in a graph that is being traced; arguments are checked when it runs."""
    _append(
        kv.tensors(),
        key,
        value,
        kv.key.shape[2],
        kv.window,
        kv.center is not None,
        " ".join(kv.key.names),
        kv.key.text,
        " ".join(kv.value.names),
        kv.value.text,
    )

"""`append_` as an operator of torch, which writes into its arguments: one node of a graph.

It is defined by its schema, so torch's registry calls `_append` at once: `torch.library.custom_op` would put
layers of Python around each call, which a token of a decoder pays for in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ao_core.ext.kernels import Leaves, spec_of_text
from ao_quant.kv_cache.state import QuantizedKV
from ao_quant.kv_cache.update import append_now

__all__ = ["append_traced"]

#: exported programs hold calls of it
_SCHEMA = (
    "kv_append(Tensor(a0!)[] state, Tensor key, Tensor value, SymInt size, SymInt window, bool centered, "
    "str key_names, str key_spec, str value_names, str value_spec) -> ()"
)


def _append(
    state: list[Tensor],
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
    # where torch's registry calls this, it counts no change
    torch.autograd.graph.increment_version([x for x in state if not x.is_inference()])


def _fake(*arguments: Any) -> None:
    return None


_LIBRARY = torch.library.Library("ao_quant", "FRAGMENT")
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("kv_append", _append, "CompositeExplicitAutograd")
torch.library.register_fake("ao_quant::kv_append", _fake, lib=_LIBRARY)
_OP = torch.ops.ao_quant.kv_append.default


def append_traced(kv: QuantizedKV, key: Tensor, value: Tensor) -> None:
    """The node in a graph that is being traced; arguments are checked when it runs."""
    _OP(
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

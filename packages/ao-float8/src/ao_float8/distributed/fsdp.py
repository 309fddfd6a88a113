"""FSDP2: the scales of all weights that it gathers in float8, with one all-reduce."""

from __future__ import annotations

from torch import nn

from ao_core.ext.compute import precompute_scales

__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]


def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Find the scale of every weight of a sharded model that FSDP2 gathers in float8.

    Call it after each step of the optimizer, and once before the first: it takes the place of an
    all-reduce for each weight and gather. Weights with other scales than one for the tensor need none.

    Args:
        model: after `fully_shard`.

    Raises:
        RuntimeError: not here, but where a weight is gathered that has grown since.
    """
    precompute_scales(model.parameters())

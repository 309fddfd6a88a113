"""Weights and activations that are multiplied in low precision, and what FSDP2 gathers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.compute import (
    FakeQuantize,
    Matmuls,
    Points,
    chosen_points,
    delay_,
    deployed,
    encoded,
    extra_tensors,
    fake_quantized,
    format_of,
    give_extras,
    is_delayed,
    learned_by,
    points_of,
    prepared_weights,
    register_fake_quantize,
    rescaled,
    rounded,
    rule_of,
    straight_through,
    straight_through_by,
    take_extras,
    trainable_scale,
)
from ao_core.compute.gather import (
    FLOAT8_ALL_GATHER,
    all_reduce_max,
    cast_shard,
    precompute_scales,
    shared_cast,
    with_float8_all_gather,
)
from ao_core.compute.unwrap import unwrap_
from ao_core.compute.watching import TrainingWarning
from ao_core.lazy import lazy_names

if TYPE_CHECKING:
    from ao_core.compute.fused_quant import rms_norm_quantized, silu_mul_quantized

__all__ = [
    "FLOAT8_ALL_GATHER",
    "FakeQuantize",
    "Matmuls",
    "Points",
    "TrainingWarning",
    "all_reduce_max",
    "cast_shard",
    "chosen_points",
    "delay_",
    "deployed",
    "encoded",
    "extra_tensors",
    "fake_quantized",
    "format_of",
    "give_extras",
    "is_delayed",
    "learned_by",
    "points_of",
    "precompute_scales",
    "prepared_weights",
    "register_fake_quantize",
    "rescaled",
    "rms_norm_quantized",
    "rounded",
    "rule_of",
    "shared_cast",
    "silu_mul_quantized",
    "straight_through",
    "straight_through_by",
    "take_extras",
    "trainable_scale",
    "unwrap_",
    "with_float8_all_gather",
]

#: their module imports torch's compiler, which takes longer than quantizing a small model
_MODULES = {
    "rms_norm_quantized": "ao_core.compute.fused_quant",
    "silu_mul_quantized": "ao_core.compute.fused_quant",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)

"""Weights and activations that are multiplied in low precision, and what FSDP2 gathers of them."""

from __future__ import annotations

from ao_core.compute import (
    FakeQuantize,
    Matmuls,
    extra_tensors,
    fake_quantized,
    register_fake_quantize,
    straight_through,
)
from ao_core.compute.fused_quant import rms_norm_quantized, silu_mul_quantized
from ao_core.compute.gather import (
    FLOAT8_ALL_GATHER,
    all_reduce_max,
    cast_shard,
    precompute_scales,
    shared_cast,
    with_float8_all_gather,
)
from ao_core.compute.unwrap import unwrap_

__all__ = [
    "FLOAT8_ALL_GATHER",
    "FakeQuantize",
    "Matmuls",
    "all_reduce_max",
    "cast_shard",
    "extra_tensors",
    "fake_quantized",
    "precompute_scales",
    "register_fake_quantize",
    "rms_norm_quantized",
    "shared_cast",
    "silu_mul_quantized",
    "straight_through",
    "unwrap_",
    "with_float8_all_gather",
]

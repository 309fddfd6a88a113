"""Training with float8 matmuls on several devices: FSDP2 and tensor parallelism that send float8."""

from __future__ import annotations

from ao_float8.distributed.fsdp import precompute_float8_dynamic_scale_for_fsdp
from ao_float8.distributed.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

__all__ = [
    "Float8ColwiseParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "precompute_float8_dynamic_scale_for_fsdp",
]

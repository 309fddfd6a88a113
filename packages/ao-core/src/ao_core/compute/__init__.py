"""`ComputeWeight`: a weight stored in high precision and multiplied in low, with all that belongs to it."""

from __future__ import annotations

from ao_core.compute import experts, linear, methods  # noqa: F401  they fill the tables
from ao_core.compute.delaying import delay_, prepared_weights
from ao_core.compute.extras import extra_tensors, give_extras, take_extras
from ao_core.compute.fake_quantize import (
    FakeQuantize,
    encoded,
    fake_quantized,
    format_of,
    register_fake_quantize,
    rule_of,
    straight_through_by,
)
from ao_core.compute.learned import Points, chosen_points, learned_by, points_of
from ao_core.compute.matmuls import Matmuls
from ao_core.compute.reading import deployed, is_delayed, rounded
from ao_core.compute.rescaled import rescaled, trainable_scale
from ao_core.compute.straight_through import straight_through
from ao_core.compute.weight import ComputeWeight

__all__ = [
    "ComputeWeight",
    "FakeQuantize",
    "Matmuls",
    "Points",
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
    "prepared_weights",
    "register_fake_quantize",
    "rescaled",
    "rounded",
    "rule_of",
    "straight_through",
    "straight_through_by",
    "take_extras",
    "trainable_scale",
]

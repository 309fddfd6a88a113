"""Pruning: methods that find masks, and what keeps masks while a model trains on."""

from __future__ import annotations

from ao_sparsity.prune.allocation import Curve, Sensitivity, sensitivity
from ao_sparsity.prune.keeping import (
    apply_fake_sparsity,
    apply_masks,
    attach_masks,
    keep_masks,
    remove_masks,
)
from ao_sparsity.prune.magnitude import prune_magnitude
from ao_sparsity.prune.movement import Movement
from ao_sparsity.prune.patterns import Blocks, Columns, Heads, NofM, Pattern, Rows, Unstructured
from ao_sparsity.prune.result import PruneRecord, PruneReport, Pruning
from ao_sparsity.prune.schedules import (
    CubicSchedule,
    GradualPruning,
    LinearSchedule,
    OneShotSchedule,
)
from ao_sparsity.prune.sparsegpt import prune_sparsegpt
from ao_sparsity.prune.wanda import prune_wanda

__all__ = [
    "Blocks",
    "Columns",
    "CubicSchedule",
    "Curve",
    "GradualPruning",
    "Heads",
    "LinearSchedule",
    "Movement",
    "NofM",
    "OneShotSchedule",
    "Pattern",
    "PruneRecord",
    "PruneReport",
    "Pruning",
    "Rows",
    "Sensitivity",
    "Unstructured",
    "apply_fake_sparsity",
    "apply_masks",
    "attach_masks",
    "keep_masks",
    "prune_magnitude",
    "prune_sparsegpt",
    "prune_wanda",
    "remove_masks",
    "sensitivity",
]

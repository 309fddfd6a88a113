"""Checkpoints larger than memory: quantized from files to files, without the model they are of."""

from __future__ import annotations

from ao_core.checkpoints.plan import CheckpointPlan, plan_checkpoint
from ao_core.checkpoints.replay import Replayed, replay_checkpoint
from ao_core.checkpoints.run import quantize_checkpoint
from ao_core.checkpoints.verify import Verified, verify_checkpoint

__all__ = [
    "CheckpointPlan",
    "Replayed",
    "Verified",
    "plan_checkpoint",
    "quantize_checkpoint",
    "replay_checkpoint",
    "verify_checkpoint",
]

"""Optimizers with state in 8 bits, 4 bits or float8, built on ao-core."""

from __future__ import annotations

from ao_optim.__about__ import __version__
from ao_optim.calls import StepCall
from ao_optim.checkpoints import full_state
from ao_optim.formats import FORMATS, StateFormat
from ao_optim.galore import GaLore
from ao_optim.offload import CPUOffloadOptimizer
from ao_optim.optimizer import LostUpdatesWarning, LowBitOptimizer
from ao_optim.optimizers import (
    Adagrad8bit,
    Adam4bit,
    Adam8bit,
    AdamFp8,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    AdEMAMix8bit,
    LAMB8bit,
    Lion8bit,
    Muon8bit,
    RMSprop8bit,
    SGD8bit,
)
from ao_optim.report import StateReport, state_report

__all__ = [
    "FORMATS",
    "AdEMAMix8bit",
    "Adagrad8bit",
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "GaLore",
    "LAMB8bit",
    "Lion8bit",
    "LostUpdatesWarning",
    "LowBitOptimizer",
    "Muon8bit",
    "RMSprop8bit",
    "SGD8bit",
    "StateFormat",
    "StateReport",
    "StepCall",
    "__version__",
    "full_state",
    "state_report",
]

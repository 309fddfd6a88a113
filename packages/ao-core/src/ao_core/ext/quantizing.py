"""What `quantize_` is made of: decisions per parameter, conversion, warnings, progress."""

from __future__ import annotations

from ao_core.calibration.needing import needs_data
from ao_core.outcome import (
    EmulationWarning,
    NothingConvertedWarning,
    tell,
    warn_caller,
    warn_if_emulated,
    when_quantized,
)
from ao_core.progress import Progress, watched
from ao_core.quantize import apply_decisions, convert, transformed
from ao_core.stacks import stack_of
from ao_core.targets import Decision, FilterFn, decide
from ao_core.tensor.grid import Grid, Level, Rounder, grid_of, regridded
from ao_core.tensor.step_matmuls import stepped_problem

__all__ = [
    "Decision",
    "EmulationWarning",
    "FilterFn",
    "Grid",
    "Level",
    "NothingConvertedWarning",
    "Progress",
    "Rounder",
    "apply_decisions",
    "convert",
    "decide",
    "grid_of",
    "needs_data",
    "regridded",
    "stack_of",
    "stepped_problem",
    "tell",
    "transformed",
    "warn_caller",
    "warn_if_emulated",
    "watched",
    "when_quantized",
]

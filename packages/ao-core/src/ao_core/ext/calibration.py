"""Calibration: running a model on data, statistics of what weights are multiplied with, and visits."""

from __future__ import annotations

from ao_core.calibration.algorithms import config_of
from ao_core.calibration.block import Block, BlockWeight
from ao_core.calibration.gathering import Group, Need, collect
from ao_core.calibration.hessian import best_of_rank, inverse_factor, output_error
from ao_core.calibration.inputs import (
    UNSEEN,
    Data,
    Seen,
    batches_of,
    unobservable,
    unseen_reason,
)
from ao_core.calibration.matrices import matrices, matrix_shape, operand, unmatrices
from ao_core.calibration.observing import Note, observing
from ao_core.calibration.ranks import OverRanks, over_ranks
from ao_core.calibration.samples import (
    Replacement,
    Sample,
    answer,
    call,
    evaluating,
    replaced,
    tensor_of,
)
from ao_core.calibration.statistics import (
    ABS_MAX,
    ABS_SUMS,
    CROSS,
    HESSIAN,
    RANGE,
    SQUARES,
    SUMS,
    State,
    Statistic,
    Statistics,
    merged,
    merged_over_ranks,
    sampled_rows,
    union,
)
from ao_core.calibration.visit import AtOnce, Inputs, Rewrite, Visit, inputs_of, visit

__all__ = [
    "ABS_MAX",
    "ABS_SUMS",
    "CROSS",
    "HESSIAN",
    "RANGE",
    "SQUARES",
    "SUMS",
    "UNSEEN",
    "AtOnce",
    "Block",
    "BlockWeight",
    "Data",
    "Group",
    "Inputs",
    "Need",
    "Note",
    "OverRanks",
    "Replacement",
    "Rewrite",
    "Sample",
    "Seen",
    "State",
    "Statistic",
    "Statistics",
    "Visit",
    "answer",
    "batches_of",
    "best_of_rank",
    "call",
    "collect",
    "config_of",
    "evaluating",
    "inputs_of",
    "inverse_factor",
    "matrices",
    "matrix_shape",
    "merged",
    "merged_over_ranks",
    "observing",
    "operand",
    "output_error",
    "over_ranks",
    "replaced",
    "sampled_rows",
    "tensor_of",
    "union",
    "unmatrices",
    "unobservable",
    "unseen_reason",
    "visit",
]

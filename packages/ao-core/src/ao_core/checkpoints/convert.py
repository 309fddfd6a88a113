"""One tensor of a checkpoint: read, quantized or passed on, and recorded."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core.calibration.needing import algorithm_of
from ao_core.checkpoints.homes import Step, crossing_reason
from ao_core.checkpoints.job import Job
from ao_core.checkpoints.rows import by_rows
from ao_core.errors import AoError, ConfigError
from ao_core.quantize import sample_sqnr, transformed
from ao_core.records import Skip
from ao_core.report import ParameterRecord
from ao_core.targets import Decision
from ao_core.tensor import QTensor, check_quantizable
from ao_core.tensor.saving.leaves import Record, flatten, placeholder

__all__ = ["Converted", "convert", "kept_record", "planned", "quantized_record", "result_of"]


class Converted(NamedTuple):
    """A tensor as it is to be written."""

    leaves: dict[str, Tensor]
    #: of a quantized one
    record: Record | None
    report: ParameterRecord


def convert(job: Job, step: Step) -> Converted:
    """Read a tensor and do with it what was decided.

    Raises:
        CheckpointError: its bytes cannot be read, or are not what was written.
        QuantizationError: it has NaN or inf values.
        ConfigError: the configuration does not make a quantized tensor.
    """
    start = time.perf_counter()
    if not step.wanted:
        return _passed_on(job, step, kept_record(step))
    dense = job.checkpoint.read(step.entry.fqn)
    check_quantizable(dense, step.fqn)
    new = result_of(step, dense)
    if isinstance(new, Skip):
        return _passed_on(job, step, kept_record(step, new))
    leaves, record = flatten(step.fqn, new)
    seconds = time.perf_counter() - start
    return Converted(leaves, record, quantized_record(step, new, sample_sqnr(dense, new), seconds))


def _passed_on(job: Job, step: Step, report: ParameterRecord) -> Converted:
    """The bytes as they are, whatever they stand for."""
    leaves = {
        step.fqn + leaf.removeprefix(step.entry.fqn): job.checkpoint.read(leaf)
        for leaf in step.entry.leaves
    }
    record = job.checkpoint.records.get(step.entry.fqn)
    own = {} if record is None else placeholder(step.fqn)  # which files of version 1 lack
    return Converted({**own, **leaves}, record, report)


def result_of(step: Step, dense: Tensor) -> QTensor | Skip:
    """What the configuration makes of a tensor, or why it cannot."""
    entry = step.plan
    assert entry is not None
    if (whole := _joined(entry, dense)) is not None and isinstance(whole, Skip):
        return whole
    if whole is not None and (reason := crossing_reason(step, whole)):
        return Skip(reason)
    if step.place and isinstance(number := step.place[0], int):
        entry = _of_matrix(entry, number)
    new = by_rows(
        dense,
        lambda rows: transformed(entry, rows),
        of_matrix=lambda number, rows: transformed(_of_matrix(entry, number), rows),
    )
    if isinstance(new, (QTensor, Skip)):
        if isinstance(new, QTensor) and whole is not None and new.spec != whole.spec:
            return Skip(
                f"it is joined into {entry.fqn}, whose format would be {whole.spec}, not {new.spec}"
            )
        return new
    raise ConfigError(
        f"{type(entry.config).__name__} makes a {type(new).__name__}, whose memory is what it "
        "was: there is nothing to write"
    )


def _of_matrix(entry: Decision, number: int) -> Decision:
    """The decision for one matrix of a 3-D weight."""
    assert entry.config is not None
    return replace(entry, config=entry.config.of_matrix(number))


def _joined(decision: Decision, dense: Tensor) -> QTensor | Skip | None:
    """What becomes of the parameter that a tensor of a file is a part of, on the meta device.

    None: it is the whole parameter, or only values would tell.
    """
    shape = tuple(decision.tensor.shape)
    if shape == tuple(dense.shape):
        return None
    try:
        new = transformed(decision, torch.empty(shape, dtype=dense.dtype, device="meta"))
    except AoError:
        raise
    except Exception:  # a plugin's, from values that are not there: it may be of any kind
        return None
    return new if isinstance(new, (QTensor, Skip)) else None


def planned(step: Step) -> QTensor | Skip | None:
    """What the configuration would make of the tensor, on the meta device.

    None: it needs values, as only an algorithm that chooses by them does.
    """
    assert step.plan is not None
    if (algorithm := algorithm_of(step.plan.config)) is not None:
        becomes = algorithm.becomes(step.plan.config)
        step = replace(step, plan=replace(step.plan, config=becomes))
        if becomes is None:
            return Skip("data decides what becomes of it")
    try:
        return result_of(step, torch.empty(step.entry.shape, dtype=step.entry.dtype, device="meta"))
    except AoError:
        raise
    except Exception:  # a plugin's, from values that are not there: it may be of any kind
        return None


def kept_record(step: Step, skip: Skip | None = None) -> ParameterRecord:
    """The record of a tensor that stays as it is, because nobody asked for it or it cannot be done."""
    status, reason = ("unchanged", step.reason) if skip is None else ("skipped", skip.reason)
    size = step.entry.nbytes
    return ParameterRecord(step.fqn, status, reason, step.entry.shape, size, size, tied=step.tied)


def quantized_record(
    step: Step, new: QTensor, sqnr_db: float | None = None, seconds: float = 0.0
) -> ParameterRecord:
    """The record of a tensor that was quantized, or would be. It names no kernel: another machine serves."""
    return ParameterRecord(
        fqn=step.fqn,
        status="changed",
        reason=step.reason,
        shape=step.entry.shape,
        bytes_before=step.entry.nbytes,
        bytes_after=new.stored_bytes,
        spec=str(new.spec),
        sqnr_db=sqnr_db,
        seconds=seconds,
        tied=step.tied,
        sparsity=new.sparsity,
    )

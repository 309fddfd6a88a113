"""What quantizing a checkpoint would give, before anything is written: sizes, reasons, memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

import torch

from ao_core.arguments import checked_but
from ao_core.calibration.inputs import Data
from ao_core.calibration.needing import algorithm_of
from ao_core.checkpoints.convert import kept_record, planned, quantized_record, result_of
from ao_core.checkpoints.decide import make_job
from ao_core.checkpoints.files import copied_files, left_out_files
from ao_core.checkpoints.homes import Step
from ao_core.checkpoints.job import Job
from ao_core.config import ConfigLike
from ao_core.records import Skip
from ao_core.report import ParameterRecord, Report, aligned, size_text
from ao_core.report.text import names, shape_text

__all__ = ["CheckpointPlan", "plan_checkpoint", "plan_of"]

#: characters of a line
_WIDTH = 120
_HEADER = ("tensor", "shape", "dtype", "before", "after", "becomes")


@dataclass(frozen=True)
class CheckpointPlan:
    """What `quantize_checkpoint` would do; `str` is a table."""

    #: a record for each tensor, without SQNR
    report: Report
    #: dtype of each tensor in the source, by name
    dtypes: dict[str, str]
    #: bytes of memory that the work takes at most, beyond what the process has before it
    peak_memory: int
    #: what that says, in words
    memory: str
    #: how it is known what module has each tensor
    modules: str
    #: names of the other files that are copied
    files: tuple[str, ...]
    #: those that are not, and why
    left_out: dict[str, str]

    def __str__(self) -> str:
        rows = [self._row(record) for record in self.report]
        report = self.report
        count, total = len(report.with_status("changed")), len(report.records)
        sizes = f"{size_text(report.bytes_before)} → {size_text(report.bytes_after)}"
        lines = [
            "",
            f"{count} of {total} tensors to quantize, {report.coverage:.1f}% of the bytes: {sizes}",
            f"memory: {self.memory}",
            f"modules: {self.modules}",
            f"copied too: {', '.join(self.files) or 'no other file'}",
            *(f"left out: {name}: {reason}" for name, reason in self.left_out.items()),
        ]
        table = aligned([_HEADER, *rows], right=(3, 4), width=_WIDTH)
        return "\n".join([table, *(fill(line, _WIDTH, subsequent_indent="  ") for line in lines)])

    def _row(self, record: ParameterRecord) -> tuple[str, ...]:
        return (
            names(record),
            shape_text(record.shape),
            self.dtypes[record.fqn],
            size_text(record.bytes_before),
            size_text(record.bytes_after),
            record.spec or f"{record.status}: {record.reason}",
        )


@checked_but("data")
def plan_checkpoint(
    src: str | os.PathLike[str],
    config: ConfigLike | Sequence[ConfigLike],
    *,
    data: Data | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> CheckpointPlan:
    """What `quantize_checkpoint` would do with the same arguments; reads headers only.

    Sizes are those of the tensors. An algorithm that needs values, which are not there, is asked what
    it makes of zeros; a weight that is refused because of its values is found by the work only.

    Raises:
        AoError: as `quantize_checkpoint`, before it writes anything.
    """
    return plan_of(make_job(src, config, data=data, include=include, exclude=exclude))


def plan_of(job: Job) -> CheckpointPlan:
    """The plan of a job."""
    source = job.checkpoint.path
    return CheckpointPlan(
        report=Report(job.asked, tuple(map(_record, job.steps))),
        dtypes={s.fqn: str(s.entry.dtype).removeprefix("torch.") for s in job.steps},
        peak_memory=job.peak_memory,
        memory=job.memory_text(),
        modules=job.modules,
        files=tuple(file.name for file in copied_files(source)),
        left_out=left_out_files(source),
    )


def _record(step: Step) -> ParameterRecord:
    if not step.wanted:
        return kept_record(step)
    new = planned(step)
    if new is None and step.plan is not None and algorithm_of(step.plan.config) is None:
        new = result_of(step, torch.zeros((), dtype=step.entry.dtype).expand(step.entry.shape))
    if new is None:
        new = Skip("data decides what becomes of it")
    return kept_record(step, new) if isinstance(new, Skip) else quantized_record(step, new)

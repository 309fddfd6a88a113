"""What a model remembers of a quantization, for the lock that `save_model` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ao_core.calibration.digest import digest
from ao_core.calibration.inputs import Seen
from ao_core.calibration.samples import Sample
from ao_core.report import Report
from ao_core.spec import Spec
from ao_core.tensor import QTensor
from ao_core.tensor.saving.lock import Done, kernels_of, note

__all__ = ["remember"]


def remember(model: nn.Module, report: Report, batches: Sequence[Sample] | Seen | None) -> None:
    """Note the configuration, a hash of the data, and the kernels, where a parameter was changed."""
    changed = {record.fqn for record in report.with_status("changed")}
    if not changed:
        return
    weights = [p for n, p in model.named_parameters() if n in changed and isinstance(p, QTensor)]
    device = weights[0].device.type if weights else "cpu"
    kernels = kernels_of(_forms(weights), device)
    note(model, Done(report.config, "" if batches is None else digest(_samples(batches)), kernels))


def _samples(batches: Sequence[Sample] | Seen) -> Sequence[Any]:
    if not isinstance(batches, Seen):
        return batches
    return [dict(each.values) for of in batches.statistics.values() for each in of]


def _forms(weights: Sequence[QTensor]) -> Iterator[tuple[Spec, tuple[int, ...], torch.dtype]]:
    for weight in weights:
        layout = weight.layout_record.canonical_of(weight.spec, weight.format)
        yield weight.spec.in_layout(layout), weight.stored_shape, weight.dtype

"""Activations as they are multiplied: after the input steps that were chosen for a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ao_core.calibration.matrices import operand
from ao_core.calibration.observing import Note
from ao_core.errors import QuantizationError
from ao_core.targets import Decision
from ao_core.tensor import QTensor
from ao_core.tensor.chosen_steps import ChosenSteps
from ao_core.weights import is_transposed

__all__ = ["attached", "same_tensor", "stepped_weight", "stepping", "unstepped_weight"]


def stepping(entries: Sequence[Decision], note: Note) -> Note:
    """`note` of activations after the chosen steps of the weights that have any.

    Weights of the same activations and the same steps get the same tensor, so that they share statistics.
    """
    chosen = {entry.fqn: entry.steps for entry in entries if entry.steps is not None}
    if not chosen:
        return note
    last: list[tuple[Tensor, ChosenSteps, int, Tensor]] = []

    def after_steps(name: str, number: int, x: Tensor) -> None:
        steps = chosen.get(name)
        if steps is None:
            note(name, number, x)
            return
        if not (last and last[0][1:3] == (steps, number) and same_tensor(last[0][0], x)):
            with torch.no_grad():
                last[:] = [(x, steps, number, steps.rows(x, number))]
        note(name, number, last[0][3])

    return after_steps


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to be the same values in the same memory."""
    return (
        not (a.is_inference() or b.is_inference())  # which count no changes
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a._version == b._version
    )


def stepped_weight(entry: Decision, values: Tensor) -> Tensor:
    """W S⁻¹ of a weight as its module stores it; the same where no steps are chosen."""
    if entry.steps is None:
        return values
    target = entry.owners[0]
    found = entry.steps.weight(operand(values, target))
    return operand(found, target)  # which is its own inverse


def unstepped_weight(entry: Decision, values: Tensor) -> Tensor:
    """Inverse of `stepped_weight`."""
    if entry.steps is None:
        return values
    target = entry.owners[0]
    return operand(entry.steps.unstepped(operand(values, target)), target)


def attached(entry: Decision, q: Tensor) -> Tensor:
    """The quantized weight W from that of W S⁻¹; the same where no steps are chosen.

    Raises:
        QuantizationError: it cannot have the steps.
    """
    if entry.steps is None:
        return q
    if not isinstance(q, QTensor):
        raise QuantizationError(
            f"input steps ({', '.join(map(str, entry.steps.steps))}) were chosen for it, which a "
            f"{type(q).__name__} does not have"
        )
    turned = is_transposed(entry.owners[0])
    stored: QTensor = q.t() if turned else q  # type: ignore[assignment]
    found = entry.steps.attached(stored)
    return found.t() if turned else found

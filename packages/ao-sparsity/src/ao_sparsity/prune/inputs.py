"""Running a model on calibration data, and seeing what its weights are multiplied with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ao_core.arguments import shown
from ao_core.errors import ConfigError, QuantizationError
from ao_core.observing import Note, observing
from ao_core.progress import Progress, watched
from ao_core.samples import Sample, call, evaluating
from ao_core.targets import Decision
from ao_core.tensor.sharding import is_sharded
from ao_core.weights import is_transposed

__all__ = ["UNSEEN", "Data", "Group", "batches_of", "groups_of", "no_inputs", "observe", "rows_of"]

#: the reason of a weight that the data does not reach
UNSEEN = "the calibration data never reached it"

#: batches of calibration data, each an input of the model
Data = Iterable[Sample]


def batches_of(data: Data | None, method: str) -> list[Sample]:
    """The batches.

    Raises:
        ConfigError: there are none, or `data` is a batch itself.
    """
    single = isinstance(data, (Tensor, Mapping, str, bytes)) or not isinstance(data, Iterable)
    if single:
        found = "None" if data is None else f"a single {type(data).__name__}"
        raise ConfigError(
            f"data={found}: {method} needs calibration data, a list of inputs of the model"
        )
    assert data is not None
    batches = list(data)
    if not batches:
        raise ConfigError(f"data is empty: {method} needs calibration data, a list of inputs")
    for place, batch in enumerate(batches):
        if not isinstance(batch, (Tensor, tuple, Mapping)):
            raise ConfigError(
                f"data[{place}]={shown(batch)}: an input of the model is a tensor, a tuple of arguments or a "
                "mapping of them"
            )
    return batches


def no_inputs(entry: Decision) -> str:
    """Why nothing can be known of the inputs of a weight; empty where it can."""
    if is_transposed(entry.owners[0]):
        return "the inputs of (in, out) weights are not observed; use magnitude"
    if entry.tensor.dim() != 2:
        return (
            f"the inputs of {entry.tensor.dim()}-D weights (convolutions, experts) are not observed; use "
            "magnitude"
        )
    if is_sharded(entry.tensor):
        return "the inputs of sharded weights are not observed; prune before sharding"
    return ""


def rows_of(name: str, x: Tensor) -> Tensor:
    """Activations as (rows, in), in float32 unless they are float64.

    Raises:
        QuantizationError: they have NaN or inf; names the weight.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    if not bool(torch.isfinite(rows).all()):
        raise QuantizationError(
            f"the inputs of {name} have NaN or inf; find out where the model makes them, or leave the "
            "layer out"
        )
    return rows if rows.dtype == torch.float64 else rows.float()


def observe(
    model: nn.Module,
    batches: Sequence[Sample],
    entries: Sequence[Decision],
    note: Note,
    progress: Progress = None,
) -> None:
    """Run the model, in evaluation mode and without gradients, and note the inputs of some weights."""
    names = [f"batch {number}" for number in range(1, len(batches) + 1)]
    with evaluating(model), observing([(e.fqn, e.tensor) for e in entries], note):
        for batch in watched(batches, names, progress, "observe"):
            call(model, batch, "data")


class _Enough(BaseException):
    """Ends a run of the model of which nothing more is needed."""


@dataclass
class Group:
    """Weights that are multiplied with the same inputs, like those of queries, keys and values."""

    entries: list[Decision]
    #: products of the first of them in each batch
    calls: list[int] = field(default_factory=list)

    @property
    def fqn(self) -> str:
        """The name of the first."""
        return self.entries[0].fqn

    def inputs(
        self, model: nn.Module, batches: Sequence[Sample], note: Callable[[Tensor], None]
    ) -> None:
        """Note the inputs that all batches give the group; a run ends with the last of them."""
        first = self.entries[0]
        for batch, calls in zip(batches, self.calls, strict=True):
            if not calls:
                continue
            left = [calls]

            def count(name: str, x: Tensor, left: list[int] = left) -> None:
                note(rows_of(name, x))
                left[0] -= 1
                if not left[0]:
                    raise _Enough

            with suppress(_Enough):
                observe(model, [batch], [first], count)


def groups_of(
    model: nn.Module, batches: Sequence[Sample], entries: Sequence[Decision]
) -> list[Group]:
    """The weights that the data reaches, in the order in which it does, those of the same inputs together."""
    uses: dict[str, list[tuple[int, int]]] = {}
    seen: list[Tensor] = []
    number = 0
    for index, batch in enumerate(batches):

        def note(name: str, x: Tensor, index: int = index) -> None:
            nonlocal number
            if not (seen and _same(seen[0], x)):
                # held, so that no other tensor gets its memory
                seen[:] = [x]
                number += 1
            uses.setdefault(name, []).append((index, number))

        observe(model, [batch], entries, note)
        seen.clear()
    by_name = {entry.fqn: entry for entry in entries}
    groups: dict[tuple[tuple[int, int], ...], Group] = {}
    for name, inputs in uses.items():
        calls = [sum(index == batch for batch, _ in inputs) for index in range(len(batches))]
        groups.setdefault(tuple(inputs), Group([], calls)).entries.append(by_name[name])
    return list(groups.values())


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to be the same values in the same memory."""
    return (
        not (a.is_inference() or b.is_inference())  # which count no changes
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a._version == b._version
    )

"""Batches of calibration data, and running a model on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from ao_core.arguments import shown
from ao_core.calibration.matrices import matrix_shape, operand
from ao_core.calibration.observing import Note, observing
from ao_core.calibration.ranks import OverRanks
from ao_core.calibration.samples import Sample, call, evaluating
from ao_core.calibration.statistics import Statistic, Statistics
from ao_core.calibration.stepping import stepping
from ao_core.calibration.weights import Weights
from ao_core.errors import ConfigError, QuantizationError
from ao_core.targets import Decision
from ao_core.tensor.sharding import is_sharded

__all__ = [
    "UNSEEN",
    "Data",
    "Seen",
    "batches_of",
    "finite",
    "observe",
    "operands",
    "unobservable",
    "unseen_reason",
]

#: the reason of a weight that the data does not reach
UNSEEN = "the calibration data never reached it"


@dataclass(frozen=True)
class Seen:
    """Statistics of the inputs of weights that were gathered before, in place of batches."""

    #: by the name of the weight, of each of its matrices, see `matrices`
    statistics: Mapping[str, tuple[Statistics, ...]]

    def of(self, entry: Decision, need: Sequence[Statistic]) -> tuple[Statistics, ...]:
        """Those of a weight; none where there are none.

        Raises:
            ConfigError: they lack something that is needed, or are of another weight.
        """
        found = self.statistics.get(entry.fqn, ())
        keys = {key for each in need for key in each.keys}
        for each in found:
            if missing := sorted(keys - set(each.values)) if each.rows else []:
                raise ConfigError(
                    f"data: of the inputs of {entry.fqn} there are {', '.join(each.values)}, and "
                    f"{type(entry.config).__name__} needs {', '.join(missing)}; pass batches"
                )
        count, _, columns = matrix_shape(tuple(entry.tensor.shape), entry.owners[0])
        sizes = {value.shape[-1] for each in found for value in each.values.values()}
        if found and (len(found) != count or sizes - {columns}):
            raise ConfigError(
                f"data: the statistics of {entry.fqn} are of {len(found)} matrices of "
                f"{', '.join(map(str, sorted(sizes)))} columns, and it has {count} of {columns}"
            )
        return found


#: batches of calibration data, each an input of the model; or what was seen of such before
Data = Iterable[Sample] | Seen


def batches_of(data: Data | None, method: str) -> Sequence[Sample]:
    """The batches, where there must be some.

    Raises:
        ConfigError: there are none, or `data` is a batch itself.
    """
    single = isinstance(data, (Tensor, Mapping, str, bytes, Seen)) or not isinstance(data, Iterable)
    if single:
        found = "None" if data is None else f"a single {type(data).__name__}"
        raise ConfigError(
            f"data={found}: {method} needs calibration data, a list of inputs of the model"
        )
    assert data is not None and not isinstance(data, Seen)  # noqa: PT018
    if isinstance(data, OverRanks):
        return OverRanks(tuple(_checked(data.batches, method)), data.group)
    return _checked(data, method)


def _checked(data: Iterable[Sample], method: str) -> list[Sample]:
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


def unobservable(entry: Decision) -> str | None:
    """Why the inputs of a weight cannot be observed; None where they can."""
    if isinstance(entry.owners[0].module, _ConvTransposeNd):
        return "the inputs of transposed convolutions are not observed"
    if is_sharded(entry.tensor):
        return "the inputs of sharded weights are not observed; do it before sharding"
    return None


def unseen_reason(entry: Decision) -> str:
    """Why there are no inputs of a weight after the data was run."""
    if all(isinstance(owner.module, (nn.Embedding, nn.EmbeddingBag)) for owner in entry.owners):
        return "a lookup multiplies nothing"
    return UNSEEN


def finite(name: str, x: Tensor, batch: int) -> Tensor:
    """Activations as they are.

    Raises:
        QuantizationError: they have NaN or inf; names the weight, and the batch by its number.
    """
    if not bool(torch.isfinite(x).all()):
        raise QuantizationError(
            f"the inputs of {name} have NaN or inf in data[{batch}]; look for them in that batch, find out "
            "where the model makes them, or leave the layer out"
        )
    return x


def observe(
    model: nn.Module,
    batch: Sample,
    entries: Sequence[Decision],
    note: Note,
    weights: Weights | None = None,
) -> None:
    """Run the model, in evaluation mode and without gradients, and note the inputs of some weights.

    `weights` brings those that are not in memory.
    """
    there = [entry for entry in entries if not entry.tensor.is_meta]
    note = stepping(entries, note)
    brought = nullcontext() if weights is None else weights.watching(entries, note)
    with evaluating(model), observing(operands(there), note), brought:
        call(model, batch, "data")


def operands(entries: Sequence[Decision]) -> list[tuple[str, Tensor]]:
    """Weights as `observing` takes them."""
    return [(entry.fqn, operand(entry.tensor, entry.owners[0])) for entry in entries]

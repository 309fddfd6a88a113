"""Checkpoints of other projects into a model: weights go to ao's kernels as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext import CheckpointError, checked, repack
from ao_core.ext.saving import owners_of
from ao_quant.interchange.sources import Opened, open_foreign

__all__ = ["load_foreign", "tensors_of"]


def tensors_of(opened: Opened) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of an opened checkpoint, one at a time."""
    for name in opened.dense:
        if name not in opened.unknown:
            yield name, opened.source.take(name)
    for name, weight in opened.reading.weights.items():
        yield name, weight.make()


@checked
def load_foreign(
    model: nn.Module,
    dir: str | os.PathLike[str],
    *,
    source_format: str = "",
    device: torch.device | str | None = None,
) -> tuple[str, ...]:
    """Put the tensors of a checkpoint of another project into a model of the same architecture, in place.

    Quantized weights become `QTensor`s with the values of the file, in the layout of the best kernel.
    Everything is read and checked before the model changes.

    Args:
        model: dense, with values or on the meta device.
        dir: a folder, an index or a safetensors file, of any known format.
        source_format: the name of the format; empty: found out by its tensors.
        device: where to load to; None: where each tensor of the model is, the CPU for meta tensors.

    Returns:
        Names of the tensors in the checkpoint that ao does not know the meaning of, and leaves out.

    Raises:
        CheckpointError: it is damaged or of no known format, or does not fit the model.
    """
    opened = open_foreign(dir, source_format)
    if opened.reading.refused:
        name, reason = next(iter(opened.reading.refused.items()))
        raise CheckpointError(f"{dir}: {name}: {reason}")
    owners = {owner.fqn: owner for owner in owners_of(model) if owner.persistent}
    same: dict[int, list[str]] = {}
    for name, owner in owners.items():
        same.setdefault(id(owner.tensor), []).append(name)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors_of(opened):
        if name not in owners:
            raise CheckpointError(f"{dir}: {name!r} is in no module of {type(model).__name__}")
        wanted = tuple(owners[name].tensor.shape)
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(
                f"{dir}: {name} is {tuple(tensor.shape)}, and {wanted} in the model"
            )
        where = owners[name].tensor.device
        place = torch.device(device) if device is not None else where
        moved = tensor.to("cpu" if place.type == "meta" else place)
        found[name] = repack(moved) if isinstance(moved, QTensor) else moved
    changes: list[tuple[str, Tensor]] = []
    for names in same.values():
        source = next((name for name in names if name in found), None)
        if source is None:
            raise CheckpointError(f"{dir}: {names[0]!r} of {type(model).__name__} is missing")
        shared: Tensor = found[source]
        if owners[source].is_parameter:
            learns = owners[source].tensor.requires_grad and not isinstance(shared, QTensor)
            shared = nn.Parameter(shared, requires_grad=learns and shared.is_floating_point())
        changes += [(name, shared) for name in names]
    for name, tensor in changes:
        owners[name].put(tensor)
    return tuple(opened.unknown)

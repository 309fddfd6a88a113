"""One weight from one format to another, with the verdict on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ao_core import QTensor
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Source, flatten
from ao_core.ext.saving import Record
from ao_quant.interchange.verdicts import (
    BYTES,
    REFUSED,
    REGRIDDED,
    VALUES,
    Verdict,
    attempt,
    compare,
    same_bytes,
)

__all__ = ["Stored", "convert_weight", "read_back"]


class Stored(NamedTuple):
    """What is written for one weight."""

    tensors: Mapping[str, Tensor]
    #: of ao's own format
    record: Record | None
    #: for the configuration; None: the weight is dense now
    settings: Mapping[str, Any] | None
    verdict: Verdict


def read_back(
    form: Interchange,
    name: str,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    like: QTensor,
) -> QTensor:
    """The tensor that a reader makes of what was written.

    Raises:
        CheckpointError: it makes none.
    """
    source = Source(
        {each: (t.dtype, tuple(t.shape)) for each, t in tensors.items()},
        tensors.__getitem__,
        {"dtype": str(like.dtype).removeprefix("torch.")},
        form.config({name: settings}, ()),
        form.metadata({name: settings}),
    )
    found = form.read(source).weights.get(name)
    if found is None:
        raise CheckpointError(f"{name}: {form.name} does not read what it wrote")
    return found.make()


def _tensors(
    form: Interchange | None, name: str, tensor: QTensor, settings: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    """What is stored of a tensor."""
    return flatten(name, tensor)[0] if form is None else form.write(name, tensor, settings).tensors


def _write(
    form: Interchange | None, name: str, tensor: QTensor, settings: Mapping[str, Any]
) -> Any:
    """(tensors, record, settings, notes, the tensor that they are read as)."""
    if form is None:
        leaves, record = flatten(name, tensor)
        return leaves, record, {}, (), tensor.canonical()
    written = form.write(name, tensor, settings)
    back = read_back(form, name, written.tensors, written.settings, tensor)
    return written.tensors, None, written.settings, written.notes, back


def convert_weight(
    name: str,
    weight: ForeignWeight,
    take: Callable[[str], Tensor],
    source: Interchange | None,
    target: Interchange | None,
    fits: Callable[[Mapping[str, Any]], None] = lambda settings: None,
) -> Stored:
    """Read a weight, write it, read that back, and say what became of it.

    Args:
        name: of the parameter.
        weight: as a reader found it.
        take: gives the plain tensors that it is made of.
        source: the format that it is in; None: ao's own.
        target: the format that is written; None: ao's own.
        fits: raises `QuantizationError` where its settings do not go with those of other weights.

    Raises:
        CheckpointError: the weight cannot be read.
    """
    tensor = weight.make()
    described = str(tensor.spec)
    try:
        tensors, record, settings, notes, back = _write(target, name, tensor, {})
        fits(settings)
    except QuantizationError as error:
        dense = tensor.dequantize(tensor.dtype)
        refused = Verdict(name, REFUSED, described, "dense", reason=str(error))
        return Stored({name: dense}, None, None, refused)
    if back.spec.act is None and tensor.spec.act is not None:
        notes = (*notes, "activations are not quantized there")
    most, sqnr = compare(tensor, back)
    found, target_spec = VALUES if sqnr is None else REGRIDDED, str(back.spec)
    del tensor  # one of a large weight is held at a time
    if found == VALUES and not notes:
        again = attempt(lambda: _tensors(source, name, back, weight.settings))
        back = None
        found = BYTES if again is not None and same_bytes(again, take, weight.names) else VALUES
    verdict = Verdict(name, found, described, target_spec, most, sqnr, "; ".join(notes))
    return Stored(tensors, record, settings, verdict)

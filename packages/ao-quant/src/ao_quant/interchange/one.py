"""One weight from one format to another, with the verdict on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ao_core import QTensor
from ao_core.ext import CheckpointError, QuantizationError
from ao_core.ext.interchange import ForeignWeight, Interchange, Source, flatten
from ao_core.ext.saving import Record, rebuild
from ao_quant.interchange.kept import forms_of
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

__all__ = ["Keep", "Stored", "convert_weight", "read_back"]

#: puts tensors somewhere and gives them from there
Keep = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


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
        forms_of(tensors),
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


def _write(form: Interchange | None, name: str, tensor: QTensor, keep: Keep) -> Any:
    """(tensors, record, settings, notes, the tensor that they are read as)."""
    if form is None:
        leaves, record = flatten(name, tensor)
        kept = keep(leaves)
        del leaves
        assert record is not None
        return kept, record, {}, (), rebuild(name, record, kept.__getitem__)
    written = form.write(name, tensor, {})
    kept, settings, notes = keep(written.tensors), written.settings, written.notes
    del written  # what was kept may be on disk
    back = read_back(form, name, kept, settings, tensor)
    return kept, None, settings, notes, back


def convert_weight(
    name: str,
    weight: ForeignWeight,
    take: Callable[[str], Tensor],
    source: Interchange | None,
    target: Interchange | None,
    fits: Callable[[Mapping[str, Any]], None] = lambda settings: None,
    keep: Keep = lambda tensors: tensors,
) -> Stored:
    """Read a weight, write it, read that back, and say what became of it.

    Args:
        name: of the parameter.
        weight: as a reader found it.
        take: gives the plain tensors that it is made of.
        source: the format that it is in; None: ao's own.
        target: the format that is written; None: ao's own.
        fits: raises `QuantizationError` where its settings do not go with those of other weights.
        keep: takes what is written and gives what it is read back from, which may be on disk.

    Raises:
        CheckpointError: the weight cannot be read.
    """
    tensor = weight.make()
    described = str(tensor.spec)
    try:
        tensors, record, settings, notes, back = _write(target, name, tensor, keep)
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

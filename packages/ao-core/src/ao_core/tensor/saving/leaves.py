"""One tensor as a checkpoint stores it: plain tensors, and a record that says what they are together.

A quantized tensor `w` becomes its parts `w.qdata`, `w.scale`, … (nested ones `w.scale.qdata`) in a
canonical layout, and a tensor `w` without elements. A program that knows nothing of parts finds it where it
looks for the weight, and refuses it for its shape; many that find nothing go on with random values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ao_core.errors import CheckpointError
from ao_core.schema import COUNT, SHAPE, TEXT, Fields, Items, Optional, Table, Text
from ao_core.spec import Spec
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.saving.fit import check_fit
from ao_core.tensor.wrapper import dense_memory

__all__ = [
    "PLACEHOLDER",
    "RECORD",
    "Record",
    "check_record",
    "check_storable",
    "dtype_name",
    "dtype_of",
    "flatten",
    "placeholder",
    "rebuild",
    "record_of",
    "spec_of",
]

#: dtype and shape of what stands under the name of a quantized tensor
PLACEHOLDER = (torch.uint8, (0,))

#: spec, shape, dtype and parts of a quantized tensor, ready for JSON
Record = dict[str, Any]
#: what a record must be; `check_record` sees to the rest
RECORD: Fields = Fields(
    {
        "spec": Fields({}),
        "shape": SHAPE,
        "dtype": TEXT,
        "parts": Table(Optional(lambda: RECORD), Text(r"[A-Za-z]\w*", "the name of a part"), 1),
    },
    {"order": Items(COUNT), "flat_from": Optional(SHAPE)},
)


def check_storable(fqn: str, tensor: Tensor) -> None:
    """Raise `CheckpointError` for a kind of tensor that a checkpoint cannot hold."""
    plain = dense_memory(tensor)
    if isinstance(plain, QTensor):
        plain = next(plain.leaves())[1]
    if is_lazy(plain) or plain.is_meta:
        raise CheckpointError(
            f"{fqn} has no values (it is lazy, or on the meta device); load them first"
        )
    if is_traceable_wrapper_subclass(plain):
        raise CheckpointError(
            f"{fqn} is a {type(plain).__name__}, which cannot be saved as it is; gather it or "
            "convert it to a plain tensor first"
        )
    if plain.layout != torch.strided or plain.is_quantized:
        raise CheckpointError(
            f"{fqn} is a {plain.layout} tensor of {plain.dtype}; only dense ones can be saved"
        )


def flatten(fqn: str, tensor: Tensor) -> tuple[dict[str, Tensor], Record | None]:
    """The plain tensors that a parameter or buffer is stored as, and its record if it is quantized.

    Raises:
        CheckpointError: a kind of tensor that a checkpoint cannot hold, or one that could not be loaded
            again, since its layout refuses its parts.
    """
    check_storable(fqn, tensor)
    plain = dense_memory(tensor)
    if not isinstance(plain, QTensor):
        return {fqn: plain.detach()}, None
    plain = _canonical(plain)
    _check_tree(fqn, plain)
    parts = {f"{fqn}.{name}": leaf for name, leaf in plain.leaves()}
    return {**placeholder(fqn), **parts}, record_of(plain)


def placeholder(fqn: str) -> dict[str, Tensor]:
    """What stands under the name of a quantized tensor, besides its parts."""
    dtype, shape = PLACEHOLDER
    return {fqn: torch.empty(shape, dtype=dtype)}


def _canonical(tensor: QTensor) -> QTensor:
    """Detached, part by part: torch imports its distributed tensors, 40 MB, where a subclass is detached."""
    outer = tensor.canonical()
    parts = outer.parts.items()
    return outer.like(
        {n: _canonical(p) if isinstance(p, QTensor) else p.detach() for n, p in parts}
    )


def _check_tree(fqn: str, tensor: QTensor) -> None:
    """Raise `CheckpointError` where a tensor, or a part that is quantized, could not be loaded again."""
    for name, part in tensor.parts.items():
        if isinstance(part, QTensor):
            _check_tree(f"{fqn}.{name}", part)
    check_fit(fqn, tensor.parts, tensor.spec, tensor.stored_shape, tensor.dtype)


def record_of(tensor: QTensor) -> Record:
    """What a checkpoint says of a quantized tensor in a canonical layout."""
    record: Record = {
        "spec": tensor.spec.to_dict(),
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "parts": {
            name: record_of(part) if isinstance(part, QTensor) else None
            for name, part in tensor.parts.items()
        },
    }
    if tensor.is_permuted:
        record["order"] = list(tensor.order)
        record["flat_from"] = None if tensor.flat_from is None else list(tensor.flat_from)
    return record


def rebuild(fqn: str, record: Record, take: Callable[[str], Tensor]) -> QTensor:
    """Inverse of `flatten` for a quantized tensor; `take` gives a plain tensor by name.

    Raises:
        CheckpointError: the parts do not fit the record.
    """
    parts: dict[str, Tensor] = {}
    for name, nested in record["parts"].items():
        part = f"{fqn}.{name}"
        parts[name] = take(part) if nested is None else rebuild(part, nested, take)
    spec, shape = spec_of(record), tuple(record["shape"])
    order, flat_from = _view(record)
    dtype = dtype_of(record["dtype"])
    stored = flat_from or tuple(shape[order.index(dim)] for dim in range(len(shape)))
    check_fit(fqn, parts, spec, stored, dtype)
    try:
        return QTensor(parts, spec, shape, dtype, order=order, flat_from=flat_from)
    except RuntimeError as error:  # torch cannot count so far
        raise CheckpointError(f"{fqn} cannot have the shape {shape}: {error}") from error


def spec_of(record: Record) -> Spec:
    """The format of a record.

    Raises:
        ConfigError: a field is unknown, missing, of another type or not one of its values.
    """
    return _spec(json.dumps(record["spec"]))


@lru_cache(maxsize=256)
def _spec(text: str) -> Spec:
    """The same for its JSON, since the weights of a model have few formats, and each is asked for often."""
    return Spec.from_dict(json.loads(text))


def _view(record: Record) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """How the logical dimensions come from the stored ones."""
    order = record.get("order", range(len(record["shape"])))
    flat_from = record.get("flat_from")
    return tuple(order), None if flat_from is None else tuple(flat_from)


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `dtype_of` understands."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is not one of torch {torch.__version__}")
    return dtype


def check_record(record: Record) -> None:
    """Raise `ConfigError` or ValueError where a record, of the schema `RECORD`, contradicts itself."""
    spec_of(record)
    dtype_of(record["dtype"])
    shape = list(record["shape"])
    if not shape:
        raise ValueError("shape=[]: a quantized tensor has dimensions")
    order, flat_from = _view(record)
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"order={list(order)} is not a permutation of the dimensions of {shape}")
    if flat_from is not None and (not flat_from or [prod(flat_from)] != shape):
        raise ValueError(f"flat_from={list(flat_from)} does not flatten to {shape}")
    for nested in record["parts"].values():
        if nested is not None:
            check_record(nested)

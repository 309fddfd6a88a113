"""One tensor as a checkpoint stores it: plain tensors, and a record that says what they are together.

A quantized tensor `w` becomes its parts `w.qdata`, `w.scale`, … (nested ones `w.scale.qdata`) in a
canonical layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ao_core.errors import CheckpointError, UnknownNameError
from ao_core.spec import Spec
from ao_core.tensor.activations import act_names, act_shape
from ao_core.tensor.compute import dense_memory
from ao_core.tensor.create import encode_parts
from ao_core.tensor.qtensor import QTensor

__all__ = [
    "Record",
    "check_record",
    "check_storable",
    "dtype_name",
    "dtype_of",
    "flatten",
    "rebuild",
]

#: spec, shape, dtype and parts of a quantized tensor, ready for JSON
Record = dict[str, Any]


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
        CheckpointError: a kind of tensor that a checkpoint cannot hold.
    """
    check_storable(fqn, tensor)
    plain = dense_memory(tensor).detach()
    if not isinstance(plain, QTensor):
        return {fqn: plain}, None
    plain = _canonical(plain)
    return {f"{fqn}.{name}": leaf for name, leaf in plain.leaves()}, _record(plain)


def _canonical(tensor: QTensor) -> QTensor:
    outer = tensor.canonical()
    parts = outer.parts.items()
    return outer.like({n: _canonical(p) if isinstance(p, QTensor) else p for n, p in parts})


def _record(tensor: QTensor) -> Record:
    record: Record = {
        "spec": tensor.spec.to_dict(),
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "parts": {
            name: _record(part) if isinstance(part, QTensor) else None
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
    flat_from = record.get("flat_from")
    tensor = QTensor(
        parts,
        Spec.from_dict(record["spec"]),
        tuple(record["shape"]),
        dtype_of(record["dtype"]),
        order=tuple(record["order"]) if "order" in record else None,
        flat_from=None if flat_from is None else tuple(flat_from),
    )
    expected = _part_shapes(tensor.spec, tensor.stored_shape)
    if missing := sorted(expected.keys() - parts.keys()):
        raise CheckpointError(f"{fqn} has no part {missing[0]!r}, and {tensor.spec} needs it")
    for name, part_tensor in parts.items():
        if expected.get(name, tuple(part_tensor.shape)) != tuple(part_tensor.shape):
            raise CheckpointError(
                f"{fqn}.{name} has the shape {tuple(part_tensor.shape)}, and "
                f"{tensor.spec} of {tensor.stored_shape} needs {expected[name]}"
            )
    return tensor


@lru_cache(maxsize=256)
def _part_shapes(spec: Spec, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parts of such a tensor: kernels rely on them, and a file may be anyone's."""
    try:
        parts = encode_parts(torch.empty(shape, device="meta"), spec)
    except UnknownNameError:
        raise
    except Exception:  # the encoder of a plugin need not run without values
        return {}
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    return shapes | dict.fromkeys(act_names(spec), act_shape(shape))


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
    """Raise `ConfigError`, ValueError, KeyError or TypeError where a record is malformed."""
    Spec.from_dict(record["spec"])
    dtype_of(record["dtype"])
    dims = list(range(len(record["shape"])))
    if sorted(record.get("order", dims)) != dims:
        raise ValueError(f"order={record['order']} is no permutation of the dimensions")
    if record.get("flat_from") and [prod(record["flat_from"])] != record["shape"]:
        raise ValueError(f"flat_from={record['flat_from']} does not flatten to {record['shape']}")
    for nested in record["parts"].values():
        if nested is not None:
            check_record(nested)

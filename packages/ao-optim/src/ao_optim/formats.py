"""How moments are stored: a format names a `Spec` for those with a sign and one for those without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ao_core import QTensor, Spec
from ao_core.ext import UnknownNameError, check_fields
from ao_core.ext.kernels import encode_parts

__all__ = ["FORMATS", "StateFormat", "dense", "empty_state", "format_named", "store"]


@dataclass(frozen=True)
class StateFormat:
    """How moments are kept: quantized, those of large tensors; or unquantized in a dtype of torch."""

    #: what optimizers and reports call it
    name: str
    #: of moments that may be negative; None: float32
    signed: Spec | torch.dtype | None = None
    #: of moments that may not: averages of squares
    unsigned: Spec | torch.dtype | None = None
    #: the same, of tensors with two dimensions or more
    unsigned_matrix: Spec | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def spec(self, signed: bool, shape: tuple[int, ...]) -> Spec | torch.dtype | None:
        """The format of one moment of a parameter."""
        if signed:
            return self.signed
        return self.unsigned_matrix if self.unsigned_matrix and len(shape) > 1 else self.unsigned


def _flat(dtype: str, block: int) -> Spec:
    return Spec(dtype, (block,), layout="flat")


#: every format by name
FORMATS = {
    record.name: record
    for record in (
        StateFormat("float32"),
        StateFormat("bfloat16", torch.bfloat16, torch.bfloat16),
        StateFormat("dynamic8", _flat("dynamic8", 256), _flat("dynamic8u", 256)),
        StateFormat("companded8", _flat("companded8", 256), _flat("companded8u", 256)),
        StateFormat("float8", _flat("f8e4m3", 256), _flat("f8e5m3u", 256)),
        StateFormat(
            "rank1_4bit",
            _flat("dynamic4", 128),
            _flat("linear4u", 128),
            Spec("linear4u", (1, 1), layout="rank1", options=(("scale_rule", "rank1"),)),
        ),
    )
}


def format_named(name: str) -> StateFormat:
    """The format of that name; raises `UnknownNameError`, which lists all."""
    if name not in FORMATS:
        raise UnknownNameError("state_format", name, FORMATS)
    return FORMATS[name]


def empty_state(like: Tensor, spec: Spec | torch.dtype | None) -> Tensor:
    """A moment that is 0 everywhere: zeros, or codes of anything with scales of 0."""
    if not isinstance(spec, Spec):
        return torch.zeros(like.shape, dtype=spec or torch.float32, device=like.device)
    parts = {
        name: torch.zeros(size, dtype=dtype, device=like.device)
        for name, size, dtype in _sizes(tuple(like.shape), spec)
    }
    return QTensor(parts, spec, tuple(like.shape), torch.float32)


@lru_cache(maxsize=1024)
def _sizes(shape: tuple[int, ...], spec: Spec) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Name, size and dtype of every part; models have many parameters of few shapes."""
    parts = encode_parts(torch.empty(shape, dtype=torch.float32, device="meta"), spec)
    return tuple((name, part.shape, part.dtype) for name, part in parts.items())


def dense(moment: Tensor) -> Tensor:
    """The values of a moment, quantized or not, in float32."""
    return moment.dequantize(torch.float32) if isinstance(moment, QTensor) else moment.float()


def store(value: Tensor, spec: Spec | torch.dtype | None, device: torch.device) -> Tensor:
    """A copy of a moment, quantized or not, in a format and on a device."""
    if isinstance(value, QTensor) and value.spec == spec:
        # this very spec, by whose identity `apply` tells formats apart
        return value.map_leaves(lambda part: part.to(device, copy=True), spec=spec)
    plain = dense(value).detach().to(device, torch.float32, copy=True)
    if not isinstance(spec, Spec):
        return plain.to(spec or torch.float32)
    return QTensor(encode_parts(plain, spec), spec, tuple(plain.shape), torch.float32)

"""What casting does to one operand: counted on its values, added up over the calls of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor

from ao_core import Spec
from ao_core.ext import registry
from ao_core.ext.kernels import decode_parts, encode_parts, unpack_parts
from ao_core.ext.numerics import split_blocks, sqnr_of_sums

__all__ = ["PrecisionRecord", "Tally", "measure"]


@dataclass(frozen=True)
class PrecisionRecord:
    """One operand of one matmul of one layer, over all its calls in one step."""

    step: int
    #: name of the module
    layer: str
    #: "output", "grad_input" or "grad_weight"
    matmul: str
    #: "input", "weight" or "grad_output"
    tensor: str
    #: the format, as text
    spec: str
    elements: int
    #: share of the elements that are not zero which the cast makes zero, in percent
    underflow_percent: float
    #: share of the elements beyond the greatest value of their block, in percent
    saturation_percent: float
    #: signal to quantization noise; inf where nothing was rounded
    sqnr_db: float
    #: greatest magnitude, before the cast
    amax: float
    #: least and greatest scale of a block; NaN where a block has a NaN
    scale_min: float
    scale_max: float
    #: elements that are NaN or infinite
    nonfinite: int

    def to_json(self) -> str:
        """One line of JSON; numbers that are not finite are the strings "inf" and "nan"."""
        values: dict[str, Any] = asdict(self)
        for key, value in values.items():
            if isinstance(value, float) and not isfinite(value):
                values[key] = str(value)
        return json.dumps(values)


@dataclass(frozen=True)
class Tally:
    """Counts and sums over the calls of a step."""

    spec: Spec
    elements: float = 0
    nonzero: float = 0
    underflows: float = 0
    saturated: float = 0
    nonfinite: float = 0
    signal: float = 0.0
    noise: float = 0.0
    amax: float = 0.0
    scale_min: float = inf
    scale_max: float = -inf

    def plus(self, sums: Sequence[float]) -> Tally:
        """With what `measure` found in another call."""
        *counts, amax, scale_min, scale_max = sums
        names = ("elements", "nonzero", "underflows", "saturated", "nonfinite", "signal", "noise")
        added = {n: getattr(self, n) + c for n, c in zip(names, counts, strict=True)}
        return replace(
            self,
            **added,
            amax=max(self.amax, amax),
            scale_min=_worse(min, self.scale_min, scale_min),
            scale_max=_worse(max, self.scale_max, scale_max),
        )

    def record(self, step: int, layer: str, matmul: str, tensor: str) -> PrecisionRecord:
        """The record of a step."""
        return PrecisionRecord(
            step=step,
            layer=layer,
            matmul=matmul,
            tensor=tensor,
            spec=str(replace(self.spec, act=None)),
            elements=int(self.elements),
            underflow_percent=100.0 * self.underflows / max(self.nonzero, 1),
            saturation_percent=100.0 * self.saturated / max(self.elements, 1),
            sqnr_db=float(
                sqnr_of_sums(torch.tensor([self.signal, self.noise], dtype=torch.float64))
            ),
            amax=self.amax,
            scale_min=self.scale_min,
            scale_max=self.scale_max,
            nonfinite=int(self.nonfinite),
        )


def _worse(choose: Any, a: float, b: float) -> float:
    """The lesser or the greater; NaN if one is."""
    return nan if a != a or b != b else float(choose(a, b))


def measure(x: Tensor, spec: Spec) -> list[float]:
    """Sums over a matrix, as `Tally.plus` takes them, of what the cast to `spec` does to it."""
    plain = replace(spec, layout="plain", act=None)
    x = x.detach().to(torch.float32).contiguous()
    if x.numel() == 0:
        return [0.0] * 8 + [inf, -inf]
    shape, dtype = tuple(x.shape), registry.dtypes.get(spec.dtype)
    parts = encode_parts(x, plain)
    values = decode_parts(parts, plain, shape, torch.float32)
    _, scale, _ = unpack_parts(parts, plain, shape)
    assert scale is not None  # operands of matmuls in low precision have one
    view, by_block = split_blocks(x, spec.block, scale)
    # where a block is scaled to, or half a step beyond the greatest value for integers
    limit = max(dtype.max, dtype.quant_max) * (1 + 1e-6)
    finite = torch.isfinite(x)
    nonzero = finite & (x != 0)
    error = torch.where(finite, x - values, 0).nan_to_num(0.0)
    sums = [
        torch.tensor(x.numel(), device=x.device),
        nonzero.sum(),
        (nonzero & (values == 0)).sum(),
        (view.abs() > by_block * limit).sum(),
        (~finite).sum(),
        torch.where(finite, x, 0).double().square().sum(),
        error.double().square().sum(),
        torch.where(finite, x.abs(), 0).amax(),
        scale.amin(),
        scale.amax(),
    ]
    found: list[float] = torch.stack([value.double() for value in sums]).tolist()
    return found

"""What became of a weight on its way from one format to another: measured, never claimed.

What was written is read back, and its values are compared with those of the source. Where they are equal,
it is written in the source's own format again: if these are the bytes that were there, nothing was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import inf, lcm, log10
from typing import Any

import torch
from torch import Tensor

from ao_core import WHOLE, QTensor
from ao_core.ext import AoError
from ao_core.ext.kernels import narrow

__all__ = [
    "BYTES",
    "EXIT_CODES",
    "REFUSED",
    "REGRIDDED",
    "VALUES",
    "Verdict",
    "compare",
    "same_bytes",
    "worst",
]

BYTES, VALUES, REGRIDDED, REFUSED = "bytes equal", "values equal", "re-gridded", "refused"
#: of `ao convert`: what the worst verdict makes of it
EXIT_CODES = {BYTES: 0, VALUES: 0, REGRIDDED: 3, REFUSED: 4}
#: elements that are compared at a time
_SLAB = 1 << 16


@dataclass(frozen=True)
class Verdict:
    """What became of one weight."""

    name: str
    #: one of "bytes equal", "values equal", "re-gridded", "refused"
    verdict: str
    #: the format that was read, and the one that reading what was written gives
    source: str
    target: str = ""
    #: greatest difference of a value
    max_error: float = 0.0
    #: ratio of the squares of values and of differences, in decibels; None: there is no difference
    sqnr: float | None = None
    #: why it was refused, and what has no place in the target
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def worst(verdicts: Mapping[str, Verdict] | list[Verdict]) -> str:
    """The verdict on all of them."""
    each = verdicts.values() if isinstance(verdicts, Mapping) else verdicts
    order = list(EXIT_CODES)
    return max((verdict.verdict for verdict in each), key=order.index, default=BYTES)


def _slabs(a: QTensor | Tensor, b: QTensor | Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Values of both in float32, some rows at a time."""

    def dense(x: QTensor | Tensor) -> Tensor:
        return x.dequantize(torch.float32) if isinstance(x, QTensor) else x.to(torch.float32)

    def cut(x: QTensor | Tensor, start: int) -> Tensor:
        # not `x[...]`: torch imports its distributed tensors, 40 MB, where a subclass is sliced so
        count = min(step, rows - start)
        return dense(
            narrow(x, 0, start, count) if isinstance(x, QTensor) else x.narrow(0, start, count)
        )

    rows = a.shape[0] if a.dim() > 1 else 1
    units = [_rows_of_a_block(x) for x in (a, b) if isinstance(x, QTensor)]
    # no slab begins within a block
    step = max(_SLAB * rows // max(a.numel(), 1), 1)
    step = -(-step // lcm(*units)) * lcm(*units)
    whole = [isinstance(x, QTensor) and (len(x.spec.block) == 1 or x.is_permuted) for x in (a, b)]
    if step >= rows or any(whole):
        yield dense(a), dense(b)
        return
    for start in range(0, rows, step):
        yield cut(a, start), cut(b, start)


def _rows_of_a_block(x: QTensor) -> int:
    """How many entries of the first dimension have one scale; 1 where all have, which is cut anywhere."""
    block = x.spec.block
    return block[0] if len(block) == x.dim() and block[0] != WHOLE else 1


def compare(a: QTensor | Tensor, b: QTensor | Tensor) -> tuple[float, float | None]:
    """(greatest difference, SQNR in dB) of two tensors of one shape; (0, None) where values are equal."""
    greatest, signal, noise = 0.0, 0.0, 0.0
    for one, other in _slabs(a, b):
        same = (one == other) | (one.isnan() & other.isnan())
        if bool(same.all()):
            signal += float(one.double().nan_to_num().square().sum())
            continue
        difference = (one.double() - other.double()).abs().masked_fill(same, 0.0)
        greatest = max(greatest, float(difference.nan_to_num(nan=inf).max()))
        signal += float(one.double().nan_to_num().square().sum())
        noise += float(difference.nan_to_num(nan=inf).square().sum())
    if greatest == 0.0:
        return 0.0, None
    return greatest, -inf if not signal or noise == inf else 10 * log10(signal / max(noise, 5e-324))


def same_bytes(
    of: Mapping[str, Tensor], take: Callable[[str], Tensor], names: tuple[str, ...]
) -> bool:
    """Whether tensors are exactly those of a source, by name, dtype, shape and bits."""
    if set(of) != set(names):
        return False
    for name in names:
        ours, theirs = of[name].contiguous(), take(name).contiguous()
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return False
        if not torch.equal(
            ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
        ):
            return False
    return True


def attempt(made: Callable[[], Any]) -> Any:
    """What a function gives; None where a format has no such thing."""
    try:
        return made()
    except AoError:
        return None

"""The op "encode_trellis": the nearest codes of many rings; its call type, reference and torch operator."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ao_core import Op, Spec
from ao_core.ext.kernels import run
from ao_core.ext.numerics import encode_trellis

__all__ = ["OPS", "EncodeTrellisCall", "encode_rings"]


@dataclass(frozen=True)
class EncodeTrellisCall:
    """A call of the op "encode_trellis"; an `OpCall`."""

    #: rings, and places in each
    shape: tuple[int, int]
    #: bits per weight
    bits: int
    device: str
    op: str = "encode_trellis"
    layout: str = "trellis"

    @property
    def specs(self) -> tuple[Spec, ...]:
        """None: neither values nor codes are a `QTensor`."""
        return ()


def _trials() -> Any:
    return import_module("ao_quant.trellis.trial").ENCODE_TRELLIS


OPS = (
    Op(
        "encode_trellis",
        EncodeTrellisCall,
        encode_trellis,
        """The codes, uint8 (S, T), of S rings with values near to x, float32 (S, T).

        As `ao_core.ext.numerics.encode_trellis` has it; every kernel gives the codes of the reference. Places
        from `count` on have any value.
        """,
        _trials,
        is_conversion=True,
    ),
)


# not traced: the reference has a loop over places, and a kernel is chosen when it runs
@torch.library.custom_op("ao_quant::encode_trellis", mutates_args=())
def encode_rings(x: Tensor, bits: int, count: int) -> Tensor:
    """The op, by the kernel selected for it.

    Args:
        x: float32 (S, T), contiguous.
        bits: one of `TRELLIS_BITS`.
        count: places of each ring that matter.
    """
    rings, places = x.shape
    call = EncodeTrellisCall((rings, places), bits, x.device.type)
    codes: Tensor = run(call, x, bits, count)
    return codes


@encode_rings.register_fake
def _encode_rings_fake(x: Tensor, bits: int, count: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device)

"""`int4_cpu`: the arrangement that torch's CPU matmul with 4-bit weights reads."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ao_core.layouts.base import Layout, Parts, make_parts
from ao_core.numerics import pack_bits, unpack_bits
from ao_core.spec import Spec

if TYPE_CHECKING:
    from ao_core.records import DType

__all__ = ["Int4Cpu", "gather_codes"]

GROUP_SIZES = (32, 64, 128, 256)


class Int4Cpu(Layout):
    """qdata: bytes as ATen packs them for this processor; scale and zero: [K / g, N]."""

    name = "int4_cpu"
    canonical = False
    canonical_name = "packed"
    auto_devices = ("cpu",)

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        if (spec.dtype, spec.zero_point) not in (("int4", "none"), ("uint4", "int")):
            kind = f"zero_point={spec.zero_point}"
            return f"holds symmetric int4 or asymmetric uint4, not {spec.dtype} with {kind}"
        if spec.act is not None:
            return "its matmul does not quantize activations"
        if isinstance(spec.scale_dtype, Spec):
            return "its scales cannot be quantized"
        if len(shape) != 2 or shape[0] % 16 or shape[0] == 0:
            return f"needs a 2-D weight with rows in multiples of 16, found {shape}"
        group = spec.block[-1]
        if spec.block[:-1] != (1,) or group not in GROUP_SIZES or shape[1] % group:
            return f"needs groups of {GROUP_SIZES} along each row that divide K={shape[1]}"
        return None

    def from_canonical(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> Parts:
        codes = unpack_bits(parts["qdata"], 4, shape[1])
        if spec.dtype == "int4":
            codes = codes ^ 8  # two's complement to an offset of 8, as ATen has it
        qdata = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        zero_point = parts.get("zero_point")
        scale = parts["scale"].t().contiguous()
        return make_parts(qdata, scale, None if zero_point is None else zero_point.t().contiguous())

    def to_canonical(self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType) -> Parts:
        codes = _unpack(parts["qdata"].reshape(-1), shape)
        if spec.dtype == "int4":
            codes = codes ^ 8
        zero_point = parts.get("zero_point")
        scale = parts["scale"].t().contiguous()
        zero_point = None if zero_point is None else zero_point.t().contiguous()
        return make_parts(pack_bits(codes, 4), scale, zero_point)


def gather_codes(qdata: Tensor, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
    """uint8 codes (len(ids), K), with an offset of 8, of some rows; reads nothing else."""
    n, k = shape
    ids = ids.to(torch.int64)  # places of bytes go beyond what int32 holds
    start = torch.zeros_like(ids)  # byte of a row's first code
    step = torch.zeros_like(ids)  # bytes from one code to the next
    shift = torch.zeros_like(ids)  # bits from the low end of the byte
    first = position = 0
    for run in _runs(n):
        half, local = run.rows // 2, ids - first
        place = _places(run, ids.device)[local % run.rows]
        inside = (local >= 0) & (local < run.blocks * run.rows)
        offset = position + local // run.rows * (half * k) + place % half
        start = torch.where(inside, offset, start)
        step = torch.where(inside, half, step)
        shift = torch.where(inside, place // half * 4, shift)
        first += run.blocks * run.rows
        position += run.blocks * half * k
    columns = torch.arange(k, device=ids.device)
    data = qdata.reshape(-1)[start[:, None] + columns * step[:, None]]
    return (data >> shift[:, None].to(torch.uint8)) & 15


class _Run(NamedTuple):
    """`blocks` blocks of `rows` rows, each stored as [K][rows / 2] bytes."""

    blocks: int
    rows: int
    #: row of the block whose code is nibble i of a column: low nibbles first, then high ones
    nibble_rows: tuple[int, ...]


@lru_cache(maxsize=256)
def _runs(n: int) -> tuple[_Run, ...]:
    """How ATen blocks `n` rows on this processor, read off by packing the digits of row numbers."""
    digits = -(-n.bit_length() // 4)
    with _disable_current_modes():
        row = torch.arange(n, dtype=torch.int32, device="cpu")[:, None].expand(n, 2)
        column = torch.arange(2, dtype=torch.int32, device="cpu")[None].expand(n, 2)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        planes = [
            pack((row >> 4 * d & 15).contiguous(), 1).reshape(-1).int() for d in range(digits)
        ]
        low = sum((plane & 15) << 4 * d for d, plane in enumerate(planes)).tolist()
        high = sum((plane >> 4) << 4 * d for d, plane in enumerate(planes)).tolist()
        columns = (pack(column.contiguous(), 1).reshape(-1) & 15).tolist()
    runs: list[_Run] = []
    position = start = 0
    for value, group in groupby(columns):
        half = len(list(group))
        if value == 0:
            rows = tuple(r - start for r in low[position:][:half] + high[position:][:half])
            if runs and runs[-1].nibble_rows == rows:
                runs[-1] = runs[-1]._replace(blocks=runs[-1].blocks + 1)
            else:
                runs.append(_Run(1, 2 * half, rows))
            start += 2 * half
        position += half
    return tuple(runs)


def _places(run: _Run, device: torch.device) -> Tensor:
    """The nibble that holds each row of a block."""
    return torch.tensor([run.nibble_rows.index(row) for row in range(run.rows)], device=device)


def _unpack(qdata: Tensor, shape: tuple[int, ...]) -> Tensor:
    """uint8 codes (N, K) with an offset of 8."""
    n, k = shape
    pieces, position = [], 0
    for run in _runs(n):
        size = run.blocks * run.rows * k // 2
        data = qdata[position : position + size].reshape(run.blocks, k, run.rows // 2)
        nibbles = torch.cat((data & 15, data >> 4), -1)
        codes = nibbles[..., _places(run, qdata.device)]
        pieces.append(codes.transpose(1, 2).reshape(run.blocks * run.rows, k))
        position += size
    return torch.cat(pieces)

"""`trellis`: codes of 2 to 4 bits, whose values follow from those of several rows of a column."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import DType, Layout, Spec
from ao_core.ext import Geometry, PartAxis, Parts, Quantizer, grid_axes, make_parts
from ao_core.ext.kernels import scale_values
from ao_core.ext.numerics import TRELLIS_BITS, decode_trellis, pack_bits, split_blocks, unpack_bits
from ao_quant.trellis.op import encode_rings

__all__ = ["RING", "TRELLIS", "Trellis"]

#: rows of a column whose codes are a ring
RING = 128
_RULE = ("scale_rule", "absmean")


class Trellis(Layout):
    """qdata: uint8 [..., ceil(N / 128), K * 16 * bits], for each 128 rows and each column a ring of codes.

    A ring runs along the rows, so each column has rings of its own: columns are rounded one after the other
    by GPTQ, and cut anywhere. A ring of 128 codes is a little-endian bit stream. Values are those of
    `decode_trellis` times the scale, which is the mean magnitude of its block. Where the last ring has more
    places than there are rows, their codes are chosen so that the others come near.
    """

    name = "trellis"
    affine = False
    examples = tuple(
        Spec(f"int{bits}", block, scale, layout="trellis", options=(_RULE,))
        for bits, block, scale in ((2, (1, -1), "bfloat16"), (3, (1, 16), "float32"), (4, (1, -1), "float16"))
    )  # fmt: skip

    def refuses(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> str | None:
        """Why it does not hold such a tensor, if so."""
        if dtype.name not in [f"int{bits}" for bits in TRELLIS_BITS]:
            return f"has codes of 2 to 4 bits, int2 to int4, found {dtype.name}"
        if spec.zero_point != "none" or _RULE not in spec.options:
            return f"has values around 0 by the mean magnitude: no zero points, options=({_RULE},)"
        if len(shape) < 2:
            return f"has codes along the rows of matrices, found the shape {shape}"
        return None

    def pack(
        self,
        codes: Tensor,
        scale: Tensor | None,
        zero_point: Tensor | None,
        spec: Spec,
        dtype: DType,
    ) -> Parts:
        """Parts from codes (..., N, K), N a multiple of 128: as `unpack` gives them."""
        *lead, rows, columns = codes.shape
        rings = codes.reshape(*lead, rows // RING, RING, columns).transpose(-1, -2)
        packed = pack_bits(rings.contiguous(), dtype.bits)
        width = columns * RING * dtype.bits // 8
        return make_parts(packed.reshape(*lead, rows // RING, width), scale, zero_point)

    def unpack(
        self, parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: DType
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(codes, scale, None); codes of all places, so that there are rows for whole rings."""
        rings = _rings(parts["qdata"], shape[-1], dtype.bits)
        *lead, count, _, columns = (*rings.shape[:-2], RING, rings.shape[-2])
        codes = rings.transpose(-1, -2).reshape(*lead, count * RING, columns)
        return codes, parts.get("scale"), None

    def encode(self, values: Tensor, spec: Spec, dtype: DType, quantize: Quantizer) -> Parts:
        """Scales by `quantize`, then the nearest rings."""
        _, scale, _ = quantize(values)
        by = scale_values(scale)
        assert by is not None
        view, by = split_blocks(
            values.to(torch.float32), spec.block, torch.where(by == 0, torch.inf, by)
        )
        codes = _nearest((view / by).reshape(values.shape), dtype.bits)
        return self.pack(codes, scale, None, spec, dtype)

    def decode(
        self,
        parts: Parts,
        spec: Spec,
        shape: tuple[int, ...],
        dtype: DType,
        out_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Dense values of `shape`."""
        rings = decode_trellis(_rings(parts["qdata"], shape[-1], dtype.bits), dtype.bits)
        values = rings.transpose(-1, -2).flatten(-3, -2)[..., : shape[-2], :].contiguous()
        by = scale_values(parts["scale"])
        view, by = split_blocks(values, spec.block, by)
        return (view * by).reshape(shape).to(out_dtype)

    def geometry(self, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Geometry]:
        """Rows are cut between rings, columns anywhere."""
        lead = (PartAxis(1, 1),) * (len(shape) - 2)
        qdata = (*lead, PartAxis(RING, 1), PartAxis(1, RING * dtype.bits // 8))
        return {"qdata": qdata, "scale": grid_axes(spec, shape)}

    def round_column(
        self, x: Tensor, scale: Tensor, spec: Spec, dtype: DType
    ) -> tuple[Tensor, Tensor]:
        """Codes of all places of the rings of a column (N,), and their values (N,)."""
        codes = _nearest((x.float() / scale)[:, None], dtype.bits)[:, 0]
        values = decode_trellis(codes.view(-1, RING), dtype.bits).view(-1)[: len(x)]
        return codes, values * scale


def _rings(qdata: Tensor, columns: int, bits: int) -> Tensor:
    """Codes (..., rings along the rows, K, 128)."""
    return unpack_bits(qdata.unflatten(-1, (columns, RING * bits // 8)), bits, RING)


def _nearest(x: Tensor, bits: int) -> Tensor:
    """Codes (..., N, K), N up to a multiple of 128, for values (..., N, K) in multiples of the scale."""
    *lead, rows, columns = x.shape
    count = -(-rows // RING)
    full, rest = divmod(rows, RING)
    padded = F.pad(x, (0, 0, 0, count * RING - rows))
    rings = padded.reshape(*lead, count, RING, columns).transpose(-1, -2)
    codes = torch.empty(rings.shape, dtype=torch.uint8, device=x.device)
    for part, places in ((slice(0, full), RING), (slice(full, count), rest)):
        some = rings[..., part, :, :]
        if places and some.shape[-3]:
            flat = some.reshape(-1, RING).contiguous()
            codes[..., part, :, :] = encode_rings(flat, bits, places).view(some.shape)
    return codes.transpose(-1, -2).reshape(*lead, count * RING, columns)


TRELLIS = Trellis()

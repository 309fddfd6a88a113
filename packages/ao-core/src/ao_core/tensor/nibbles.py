"""The upper halves of the codes of a weight in 8 bits, as a weight of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from ao_core.errors import ConfigError
from ao_core.numerics import pack_bits
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.relayout import repack

__all__ = ["upper_nibbles"]


def upper_nibbles(weight: QTensor) -> QTensor:
    """The weight that remains where the lower four bits of codes in int8 are not read.

    A code c = 16 h + l, with l from 0 to 15, becomes h with the middle of what l may be: 16 h + 7.5. So the
    result has 16 levels for each scale of the weight. It is in the layout of the kernel that would serve it.

    Args:
        weight: in int8 with one scale per block, and without zero points, such as "int8_weight_only" makes.

    Raises:
        ConfigError: the weight is in another format.
    """
    spec = weight.spec
    if (
        spec.dtype != "int8"
        or spec.zero_point != "none"
        or isinstance(spec.scale_dtype, type(spec))
    ):
        raise ConfigError(
            f"weight: is in {spec.dtype}, zero_point={spec.zero_point!r}; halves of codes are of int8 "
            "without zero points and with plain scales"
        )
    plain = weight.canonical()
    codes, scale = plain.parts["qdata"].view(torch.int8), plain.parts["scale"]
    upper = ((codes >> 4) + 8).to(torch.uint8)
    zero = torch.full_like(scale, 8 - 7.5 / 16)
    parts = {"qdata": pack_bits(upper, 4), "scale": 16 * scale, "zero_point": zero}
    made = replace(plain.spec, dtype="uint4", zero_point="float", layout="packed", act=None)
    return repack(QTensor(parts, made, tuple(plain.stored_shape), weight.dtype))

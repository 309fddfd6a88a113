"""Codes by scales that there are already, by the best kernel."""

from __future__ import annotations

from torch import Tensor

from ao_core.dispatch import run
from ao_core.numerics import may_be_compiled, quantize_affine
from ao_core.numerics.blocks import check_grid
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import Spec, blocks_of_numbers

__all__ = ["encode_scaled"]


def encode_scaled(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: Spec) -> Tensor:
    """The codes of `x`, uint8 in its shape, as `quantize_affine` gives them.

    Args:
        x: of the blocked shape of a layout.
        scale: one per block, of any dtype; of a codebook the values of each block.
        zero_point: in the domain of codes, or codes; None: there is none.
        spec: its dtype and block count.

    Raises:
        ConfigError: there is not one scale, or zero point, per block.
    """
    dtype = registry.dtypes.get(spec.dtype)
    # of a codebook it is the values of a block, in one more dimension
    for grid in (scale[..., 0] if dtype.kind == "codebook" else scale, zero_point):
        if grid is not None:
            check_grid(grid, tuple(x.shape), spec.block)
    if may_be_compiled(x) or x.is_meta:
        return quantize_affine(x, dtype, spec.block, scale, zero_point)
    plain = blocks_of_numbers(spec.dtype, spec.block, zero_point is not None)
    shape = tuple(x.shape)
    call = Call("encode_scaled", plain, shape, shape, x.dtype, x.device.type)
    codes: Tensor = run(call, x.detach(), scale, zero_point, plain)
    return codes

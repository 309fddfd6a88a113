"""Codes and parts by scales that there are already, by the best kernel."""

from __future__ import annotations

from torch import Tensor

from ao_core.dispatch import run
from ao_core.layouts import Parts, scale_values, zero_values
from ao_core.numerics import may_be_compiled, quantize_affine
from ao_core.numerics.blocks import check_grid
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.spec import Spec, blocks_of_numbers

__all__ = ["encode_scaled", "quantize_scaled", "quantize_scaled_reference"]


def encode_scaled(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: Spec) -> Tensor:
    """The codes of `x`, in its shape, as `quantize_affine` gives them.

    Args:
        x: of the blocked shape of a layout.
        scale: one per block, of any dtype; of a codebook the values of each block.
        zero_point: in the domain of codes, or codes; None: there is none.
        spec: its dtype and block count.

    Raises:
        ConfigError: there is not one scale, or zero point, per block.
    """
    dtype = registry.dtypes.get(spec.dtype)
    if may_be_compiled(x) or x.is_meta:
        _check_grids(tuple(x.shape), scale, zero_point, spec)
        return quantize_affine(x, dtype, spec.block, scale, zero_point)
    plain = blocks_of_numbers(spec.dtype, spec.block, zero_point is not None)
    return quantize_scaled(x, scale, zero_point, plain)["qdata"].view(dtype.code_dtype)


def quantize_scaled(x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: Spec) -> Parts:
    """The parts of `x` in a canonical layout, of which scale and zero point are these.

    Args:
        x: (..., K) in any floating-point dtype.
        scale: one per block, in the shape of `choose_qparams`, as it is to be stored.
        zero_point: likewise; None: the format has none.
        spec: the format; its scales are stored plainly.

    Raises:
        ConfigError: there is not one scale, or zero point, per block.
    """
    shape = tuple(x.shape)
    _check_grids(registry.layouts.get(spec.layout).blocked_shape(shape), scale, zero_point, spec)
    call = Call("quantize_scaled", spec, shape, shape, x.dtype, x.device.type)
    return run(call, x.detach(), scale, zero_point, spec)  # type: ignore[no-any-return]


def quantize_scaled_reference(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, spec: Spec
) -> Parts:
    """The reference kernel: `Layout.encode` of the codes of `quantize_affine`."""
    layout, dtype = registry.layouts.get(spec.layout), registry.dtypes.get(spec.dtype)
    by, point = scale_values(scale), zero_values(zero_point)

    def quantize(dense: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return quantize_affine(dense, dtype, spec.block, by, point), scale, zero_point

    # contiguous, since codes inherit strides
    return layout.encode(x.contiguous(), spec, dtype, quantize)


def _check_grids(
    shape: tuple[int, ...], scale: Tensor, zero_point: Tensor | None, spec: Spec
) -> None:
    if registry.dtypes.get(spec.dtype).kind == "codebook":
        scale = scale[..., 0]  # it is the values of a block, in one more dimension
    for grid in (scale, zero_point):
        if grid is not None:
            check_grid(grid, shape, spec.block)

"""Static scales of activations: parts of a weight beside those of its layout, alike for all layouts.

`act_scale` is float32, `act_zero_point`, of formats with a zero point, uint8 or float32. Both have one entry
for each matrix (out, in) of the weight, in as many dimensions as it has: (1, 1), or (E, 1, 1) for experts.
Filters, whose blocks are whole filters, are one matrix: (1, 1, 1, 1).
Codes and scales of the weight know nothing of them: copying dense values into it keeps them.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ao_core.arguments import shown
from ao_core.errors import ConfigError
from ao_core.layouts import SHARED, Form, Geometry, PartAxis, Parts
from ao_core.numerics import qparams_of_range
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec
from ao_core.tensor.checks import check_given

if TYPE_CHECKING:
    from ao_core.tensor.qtensor import QTensor

__all__ = [
    "act_axes",
    "act_forms",
    "act_names",
    "act_shape",
    "check_act",
    "lost_rows",
    "make_act_parts",
    "static_qparams",
    "static_qparams_of_range",
]


def act_names(spec: Spec) -> tuple[str, ...]:
    """The parts that a tensor of this format has for its activations; none unless they are static."""
    if spec.act is None or not spec.act.is_static:
        return ()
    return ("act_scale",) if spec.act.zero_point == "none" else ("act_scale", "act_zero_point")


def _matrix_dims(spec: Spec, shape: tuple[int, ...]) -> int:
    """The last dimensions that make up one matrix: two, or all of filters, whose blocks are whole filters."""
    filters = len(spec.block) == len(shape) > 2 and set(spec.block[1:]) == {WHOLE}
    return len(shape) if filters else min(len(shape), 2)


def act_shape(spec: Spec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of these parts, for a tensor of stored `shape` in the format `spec`."""
    dims = _matrix_dims(spec, shape)
    return (*shape[: len(shape) - dims], *(1,) * dims)


def act_axes(spec: Spec, shape: tuple[int, ...]) -> Geometry:
    """Their geometry: each matrix has its own, which all of its slices share."""
    dims = _matrix_dims(spec, shape)
    return (*(PartAxis(1, 1),) * (len(shape) - dims), *(SHARED,) * dims)


def act_forms(spec: Spec, shape: tuple[int, ...]) -> dict[str, Form]:
    """What these parts must be, of a tensor of stored `shape`."""
    codes = spec.act is not None and spec.act.zero_point == "int"
    dtypes = {"act_scale": torch.float32, "act_zero_point": torch.uint8 if codes else torch.float32}
    return {name: Form(act_shape(spec, shape), dtypes[name]) for name in act_names(spec)}


def _spread(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One value for all matrices, or a vector of one for each expert, in the shape of the part."""
    if value.dim() == 1 and len(shape) == 3:
        value = value.reshape(-1, 1, 1)
    return value.expand(shape)


def check_act(name: str, value: float | Tensor | None) -> None:
    """Raise `ConfigError` for a scale of activations that is not finite and positive, or a zero point."""
    if value is None or (isinstance(value, Tensor) and (value.is_meta or not value.numel())):
        return
    extremes = torch.aminmax(value.detach()) if isinstance(value, Tensor) else (value, value)
    least, greatest = map(float, extremes)
    positive = name == "act_scale"
    if not (isfinite(least) and isfinite(greatest)) or (positive and least <= 0):
        wanted = "finite and positive" if positive else "finite"
        raise ConfigError(f"{name}={shown(value)}: each value must be {wanted}")


def make_act_parts(
    spec: Spec,
    shape: tuple[int, ...],
    device: torch.device,
    scale: float | Tensor | None,
    zero_point: float | Tensor | None,
) -> Parts:
    """The parts from one value, or one for each matrix; none where the format has none.

    Raises:
        QuantizationError: values are missing, or given for activations that are not static.
    """
    names, values = act_names(spec), {"act_scale": scale, "act_zero_point": zero_point}
    check_given(
        spec, names, values,
        "scales and zero points of activations are given where its act is static; calibration finds them",
    )  # fmt: skip
    parts = {}
    for name in names:
        codes = name == "act_zero_point" and spec.act is not None and spec.act.zero_point == "int"
        dtype = torch.uint8 if codes else torch.float32
        value = torch.as_tensor(values[name], dtype=dtype, device=device)
        value = _spread(value, act_shape(spec, shape))
        parts[name] = value.clone(memory_format=torch.contiguous_format)
    return parts


def static_qparams(w: QTensor) -> tuple[Tensor | None, Tensor | None]:
    """Static scale and zero point of the activations: the parts `act_scale` and `act_zero_point` of a weight.

    (None, None) where they are chosen for each call.
    """
    parts = w.parts
    return parts.get("act_scale"), parts.get("act_zero_point")


def static_qparams_of_range(low: Tensor, high: Tensor, act: Spec) -> tuple[Tensor, Tensor | None]:
    """Static scale and zero point, if any, by which `act` holds activations from `low` to `high`.

    Where the scales of blocks share a static one, it is the one by which they hold the scale of a block
    with the greatest of these magnitudes.

    Args:
        low: least value that was seen, float32, of any shape: one range each.
        high: greatest value, of the same shape.
        act: the format of the activations.
    """
    scale, zero_point = qparams_of_range(low, high, registry.dtypes.get(act.dtype), act.zero_point)
    if act.static or not isinstance(act.scale_dtype, Spec):
        return scale, zero_point
    return static_qparams_of_range(torch.zeros_like(scale), scale, act.scale_dtype)


def lost_rows(rows: Tensor, act: Spec) -> Tensor | None:
    """Which rows of activations have NaN or inf, where the scale of the row does not tell: (M, 1).

    None where each row has a scale of its own, chosen for the call, or no columns. The matmul of a lost row
    is NaN. A common scale must be that of the others, and a static one would clip an infinity to a number.
    """
    blocks = [act.block]
    if isinstance(act.scale_dtype, Spec):
        blocks.append(act.scale_dtype.block)
    if not rows.shape[-1] or (not act.is_static and all(block[0] == 1 for block in blocks)):
        return None
    # a maximum keeps NaN, and takes a tenth of the time of `isfinite` of each element
    return ~rows.abs().amax(-1, keepdim=True).isfinite()

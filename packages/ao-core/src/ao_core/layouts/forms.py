"""What sizes and dtypes parts must have: kernels rely on them, and a file may lie."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ao_core.errors import ConfigError
from ao_core.numerics import grid_shape
from ao_core.numerics.affine import scale_storage, zero_storage
from ao_core.numerics.allowed import check_format
from ao_core.spec import NO_SCALE, Spec

if TYPE_CHECKING:
    from ao_core.layouts.base import Layout, Parts
    from ao_core.records import DType

__all__ = ["Form", "check_spec", "forms_of", "unlike"]


class Form(NamedTuple):
    """What a part must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    #: the format of a part that is itself quantized
    spec: Spec | None = None

    def __str__(self) -> str:
        kind = self.spec or str(self.dtype).removeprefix("torch.")
        return f"{kind} of shape {self.shape}"


@lru_cache(maxsize=1024)
def forms_of(layout: Layout, spec: Spec, shape: tuple[int, ...], dtype: DType) -> dict[str, Form]:
    """The form of each part that the layout makes of any values, found on the meta device.

    Raises:
        ConfigError: no tensor has such a format.
    """
    check_spec(spec, dtype)
    made: list[Tensor | None] = []

    def quantize(values: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = tuple(values.shape)
        scale, zero_point = _scale(spec, found, dtype), _zero(spec, found, dtype)
        made[:] = scale, zero_point
        return torch.empty(found, dtype=dtype.code_dtype, device="meta"), scale, zero_point

    if layout.affine:
        blocked = torch.empty(layout.blocked_shape(shape), device="meta")
        parts = layout.pack(*quantize(blocked), spec, dtype)
    else:
        parts = layout.encode(torch.empty(shape, device="meta"), spec, dtype, quantize)
    # a quantized scale, or offset zero point, is a part as it is
    nested = spec.scale_dtype if isinstance(spec.scale_dtype, Spec) else None
    quantized = made[: 2 if spec.zero_point == "offset" else 1] if nested else []
    return {
        name: Form(
            tuple(part.shape), part.dtype, nested if any(part is q for q in quantized) else None
        )
        for name, part in parts.items()
    }


def check_spec(spec: Spec, dtype: DType) -> None:
    """Raise `ConfigError` where the fields of a format do not go together."""
    if dtype.has_scale == (spec.scale_dtype == NO_SCALE):
        raise ConfigError(
            f"scale_dtype={spec.scale_dtype!r} with {dtype.name!r}, of kind {dtype.kind!r}: formats of kind "
            f"'dense' have no scale, which {NO_SCALE!r} says, and all others have one"
        )
    if dtype.has_scale:
        check_format(dtype, spec.zero_point, _stored_as(spec))


def _stored_as(spec: Spec) -> str:
    """In what scales are stored, or from what they are quantized."""
    return spec.scale_dtype if isinstance(spec.scale_dtype, str) else "float32"


def _scale(spec: Spec, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
    if not dtype.has_scale:
        return None
    grid = grid_shape(shape, spec.block)
    if dtype.kind == "codebook":
        grid = (*grid, 1 << dtype.bits)
    return torch.empty(grid, dtype=scale_storage(_stored_as(spec)), device="meta")


def _zero(spec: Spec, shape: tuple[int, ...], dtype: DType) -> Tensor | None:
    if spec.zero_point == "none":
        return None
    storage = zero_storage(spec.zero_point, scale_storage(_stored_as(spec)))
    return torch.empty(grid_shape(shape, spec.block), dtype=storage, device="meta")


def unlike(parts: Parts, forms: Mapping[str, Form]) -> str | None:
    """None, or a sentence on the first part that is missing, unknown, or not of its form."""
    if lost := [name for name in forms if name not in parts]:
        return f"there is no part {lost[0]!r}"
    if extra := [name for name in parts if name not in forms]:
        return f"there is a part {extra[0]!r}; known: {', '.join(forms)}"
    for name, form in forms.items():
        part, shape = parts[name], tuple(parts[name].shape)
        spec = getattr(part, "spec", None)
        dtype = form.dtype if form.spec else part.dtype
        if (shape, dtype, spec) != form:
            return f"its part {name!r} is {Form(shape, part.dtype, spec)}, and must be {form}"
    return None

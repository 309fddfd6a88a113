"""The kernels of `linear`, `grouped_linear`, `embedding` and `dequantize` for weights in planes."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext import Parts, registry
from ao_core.ext.numerics import full_block
from ao_kernels.triton.shared.device import current_device, sm_count, unavailable
from ao_kernels.triton.shared.dtypes import ELEMENTS
from ao_kernels.triton.shared.tile_config import described
from ao_kernels.triton.shared.tiling import Tiling
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.launch import launch_config_of
from ao_kernels.triton.weight_only.layout import LAYOUTS as DENSE_LAYOUTS
from ao_kernels.triton.weight_only.layout import tiling
from ao_kernels.triton.weight_only.layout24 import Plane24

__all__ = ["LAYOUTS", "PLANE16_KERNELS"]

LAYOUTS = (*DENSE_LAYOUTS, Plane24())

#: up to so many rows, decoding weights in every tile of rows is cheaper than once for all. By arithmetic, not
#: measured: at 128 rows a tile decodes in a fifth of the time of its products, which wait for that; decoding
#: once writes two bytes for each weight and reads them. With zero points tiles have 64 rows
MOST_ROWS = {"none": 512, "int": 128, "float": 128}


def plane16_linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Multiply by weights in planes, in one launch."""
    from ao_kernels.triton.weight_only import op

    n, k = w.stored_shape
    group = full_block(w.spec.block, (n, k))[-1]
    parts = w.parts
    out: Tensor = op.plane16_linear(
        x, parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"], bias,
        n, k, group, w.spec.dtype, _is_sparse(w.spec), parts.get("global_scale"),
    )  # fmt: skip
    return out


def plane16_grouped_linear(x: Tensor, w: QTensor, offs: Tensor | None) -> Tensor:
    """`plane16_linear` for the rows of each expert, in one launch that does not wait to know them."""
    from ao_kernels.triton.weight_only.op_experts import ends_of, plane16_grouped_linear

    _, n, k = w.stored_shape
    group = full_block(w.spec.block, (n, k))[-1]
    parts = w.parts
    out: Tensor = plane16_grouped_linear(
        x.reshape(-1, k), parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"],
        ends_of(x, offs), n, k, group, w.spec.dtype, _is_sparse(w.spec), parts.get("global_scale"),
    )  # fmt: skip
    return out.reshape(*x.shape[:-1], n)


def plane16_dequantize(
    parts: Parts, spec: Spec, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Dense values of `shape`, bit for bit those of the canonical layout."""
    from ao_kernels.triton.weight_only import op

    n, k = shape[-2:]
    group = full_block(spec.block, shape)[-1]
    out: Tensor = op.plane16_dequantize(
        parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"],
        n, k, group, spec.dtype, dtype, _is_sparse(spec), parts.get("global_scale"),
    )  # fmt: skip
    return out


def _is_sparse(spec: Spec) -> bool:
    return isinstance(registry.layouts.get(spec.layout), Plane24)


def plane16_embedding(ids: Tensor, w: QTensor) -> Tensor:
    """Rows of a weight in planes, with the bits of its dense values."""
    from ao_kernels.triton.weight_only import op

    (n, k), parts = w.stored_shape, w.parts
    group = full_block(w.spec.block, (n, k))[-1]
    out: Tensor = op.plane16_embedding(
        ids, parts["qdata"], parts["scale"], parts.get("zero_point"), parts["table"],
        n, k, group, w.spec.dtype, w.dtype, _is_sparse(w.spec), parts.get("global_scale"),
    )  # fmt: skip
    return out


def _refuses_embedding(call: Call) -> str | None:
    if call.x_dtype not in (torch.int32, torch.int64):
        return f"looks up by int32 and int64, not {call.x_dtype}"
    return None


def _refuses_linear(call: Call) -> str | None:
    return _refused(call, call.m, "rows")


def _refuses_grouped_linear(call: Call) -> str | None:
    return _refused(call, _rows_of_expert(call), "rows of an expert on average")


def _refused(call: Call, rows: int, what: str) -> str | None:
    if call.x_dtype not in ELEMENTS:
        return f"needs activations in bfloat16 or float16, found {call.x_dtype}"
    if rows > (most := MOST_ROWS[call.spec.zero_point]):
        return f"is for up to {most} {what}, found {rows}: decoding once is cheaper"
    return None


def _rows_of_expert(call: Call) -> int:
    """On average, rounded up."""
    return -(-call.m // call.weight_shape[0])


def _refuses_dequantize(call: Call) -> str | None:
    if call.x_dtype not in (*ELEMENTS, torch.float32):
        return f"writes float32, bfloat16 and float16, not {call.x_dtype}"
    return None


def _describe(call: Call) -> str:
    found = launch_config_of(
        _tiles(call), max(call.m, 1), sm_count(current_device()), zero_point=_has_zero(call)
    )
    return f"{described(found)}, sums in float32"


def _describe_grouped(call: Call) -> str:
    from ao_kernels.triton.weight_only.op_experts import launch_config_for

    found = launch_config_for(
        _tiles(call),
        max(call.m, 1),
        call.weight_shape[0],
        sm_count(current_device()),
        zero_point=_has_zero(call),
    )
    return f"all experts in one launch, {described(found)}, sums in float32"


def _tiles(call: Call) -> Tiling:
    n, k = call.weight_shape[-2:]
    fmt = known(registry.dtypes.get(call.spec.dtype), sparse=_is_sparse(call.spec))
    return tiling(n, k, full_block(call.spec.block, call.weight_shape)[-1], fmt)


def _has_zero(call: Call) -> bool:
    return call.spec.zero_point != "none"


PLANE16_KERNELS = (
    *(
        Kernel(
            f"triton_{layout.name}_linear", "linear", layout.name, "cuda", plane16_linear, 50,
            unavailable, _refuses_linear, _describe,
        )
        for layout in LAYOUTS
    ),
    *(
        Kernel(
            f"triton_{layout.name}_grouped_linear", "grouped_linear", layout.name, "cuda",
            plane16_grouped_linear, 50, unavailable, _refuses_grouped_linear, _describe_grouped,
        )
        for layout in LAYOUTS
    ),
    *(
        Kernel(
            f"triton_{layout.name}_embedding", "embedding", layout.name, "cuda",
            plane16_embedding, 50, unavailable, _refuses_embedding,
        )
        for layout in LAYOUTS
    ),
    *(
        Kernel(
            f"triton_{layout.name}_dequantize", "dequantize", layout.name, "cuda",
            plane16_dequantize, 50, unavailable, _refuses_dequantize,
        )
        for layout in LAYOUTS
    ),
)  # fmt: skip
